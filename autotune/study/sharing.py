"""How several searches share a study: each shows that it is alive, frees what dead ones held, and waits for a storage that is gone for
seconds.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar, cast

import optuna
from optuna.exceptions import ExperimentalWarning, OptunaError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, fail_stale_trials
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from autotune.records.study import BegunTrial, EndedTrial
from autotune.study.backends.base import SharedBackend
from autotune.study.place import is_gone

PATIENCE_S = 60.0  # for a storage that does not answer
AGAIN_S = 0.5  # between two attempts

F = TypeVar("F", bound=Callable[..., Any])


def persistent(method: F) -> F:
    """Repeat a method of a `Store` while its storage does not answer, for `PATIENCE_S` seconds. It must do no harm when done twice."""

    @functools.wraps(method)
    def patient(self: Any, *args: Any, **options: Any) -> Any:
        until_s = time.monotonic() + PATIENCE_S
        is_told = False
        while True:
            try:
                return method(self, *args, **options)
            except (SQLAlchemyError, OptunaError) as error:
                may_pass = self.shared is not None and self.shared.may_pass(error) and not self.is_lost
                self.is_lost = self.is_lost or time.monotonic() > until_s
                if self.is_lost or not may_pass:
                    raise
            if not is_told:
                is_told = True
                self.tell(f"the storage does not answer; it is asked again for {PATIENCE_S:.0f} s")
            time.sleep(AGAIN_S)

    return cast(F, patient)


def close_trial(storage: BaseStorage, trial: FrozenTrial) -> None:
    """Close a running trial that nobody runs any more. One that has its outcome has ended; else nothing is known of it.

    Args:
        trial: as it is now. What a list of trials holds of a running one may be as old as the trial itself.
    """
    with contextlib.suppress(UpdateFinishedTrialError):  # another search was faster
        if "outcome" in trial.user_attrs:  # measured, and not yet told
            score = EndedTrial.from_dict(trial.user_attrs).score
            storage.set_trial_state_values(trial._trial_id, TrialState.COMPLETE, [score])
        else:
            storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)


def running_elsewhere(study: optuna.Study, own: Collection[int]) -> list[FrozenTrial]:
    """The running trials of a study that are not this search's own."""
    running = study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
    return [trial for trial in running if trial._trial_id not in own]


class Watch:
    """A thread that shows that this search is alive, and frees the trials of searches that have died.

    A search is dead where its process on this machine is gone, or where the storage has had no heartbeat of it for a while by its own
    clock. After a storage was gone, every search looks dead until it is back: nobody frees anything until it has been in touch for
    as long as that takes.

    Args:
        studies: returns the studies to look after.
        own: returns the ids of this search's running trials.
        beat: shows that this search is alive where the storage keeps no heartbeats.
    """

    def __init__(
        self,
        backend: SharedBackend,
        storage: BaseStorage,
        studies: Callable[[], Sequence[optuna.Study]],
        own: Callable[[], Collection[int]],
        beat: Callable[[], None],
    ) -> None:
        self._backend, self._storage, self._studies, self._own, self._beat = backend, storage, studies, own, beat
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autotune heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        warnings.filterwarnings("ignore", category=ExperimentalWarning)
        since_s = last_s = time.monotonic()
        while not self._end.wait(self._backend.beat_s):
            if time.monotonic() - last_s > self._backend.gone_after_s:  # stopped, and perhaps the others were, too
                since_s = time.monotonic()
            try:
                self._backend.beat(self._storage, self._own())
                self._beat()
                self._free(by_heartbeat=time.monotonic() - since_s > self._backend.gone_after_s)
                last_s = time.monotonic()
            except (SQLAlchemyError, OptunaError):  # the search itself finds out, and says so
                since_s = time.monotonic()

    def _free(self, *, by_heartbeat: bool) -> None:
        studies = self._studies()
        if self._backend.all_are_heard(self._storage, [study._study_id for study in studies]):
            return  # every search asks this every few seconds: to read all that runs would keep a server busy
        for study in studies:
            for listed in running_elsewhere(study, self._own()):
                trial = self._storage.get_trial(listed._trial_id)
                begun = BegunTrial.from_dict(trial.user_attrs)
                by_clock = not self._backend.keeps_heartbeats
                if "outcome" in trial.user_attrs or is_gone(begun, is_shared=True, by_clock=by_clock):
                    close_trial(self._storage, trial)
            if by_heartbeat:
                fail_stale_trials(study)
