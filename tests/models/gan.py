"""Two networks, two optimizers, a scheduler and an average of the weights, in one step of the user's own."""

import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

NOISE, FEATURES = 8, 16


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(NOISE, 32), nn.ReLU(), nn.Linear(32, FEATURES))
        self.critic = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 1))
        self.average = AveragedModel(self.generator).requires_grad_(False)


def build_model():
    return Gan()


def make_batch(batch_size):
    return torch.randn(batch_size, FEATURES)


def configure_optimizers(model):
    generator = torch.optim.Adam(model.generator.parameters(), lr=1e-3)
    critic = torch.optim.Adam(model.critic.parameters(), lr=1e-3)
    return {
        "generator": generator,
        "critic": critic,
        "schedule": torch.optim.lr_scheduler.StepLR(critic, 100),
    }


def train_step(model, optimizers, real):
    fake = model.generator(torch.randn(len(real), NOISE, device=real.device))
    wanted = torch.cat([torch.ones(len(real), 1, device=real.device), torch.zeros(len(real), 1, device=real.device)])
    critic_loss = functional.binary_cross_entropy_with_logits(model.critic(torch.cat([real, fake.detach()])), wanted)
    optimizers["critic"].zero_grad()
    critic_loss.backward()
    nn.utils.clip_grad_norm_(model.critic.parameters(), 1.0)
    optimizers["critic"].step()
    generator_loss = functional.softplus(-model.critic(fake)).mean()
    optimizers["generator"].zero_grad()
    generator_loss.backward()
    optimizers["generator"].step()
    optimizers["schedule"].step()
    model.average.update_parameters(model.generator)
    return {"critic": critic_loss, "generator": generator_loss}
