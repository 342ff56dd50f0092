"""autotune at home in the stacks that people use: one file a stack, which imports that stack when it is used.

- `autotune.integrations.transformers`: `tune(trainer)`, `AutotuneCallback`
- `autotune.integrations.lightning`: `tune(module, datamodule, trainer)`, `AutotuneCallback`
- `autotune.integrations.accelerate`: `find_executable_config`
- `autotune.integrations.loops`: training loops of the user's own, with Accelerate or without
"""
