"""What finished studies leave for later searches: an Optuna journal a machine, beside the calibrations, one Optuna study for each of ours.

A journal is opened in a tenth of a second, where a database takes half of one, and may be written by several searches at once. A file
that cannot be read is set aside under another name. Where the folder cannot be written, nothing is remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.devices.cpu import processor_model
from autotune.errors import StudyError, in_one_line
from autotune.files import mend
from autotune.records.formats import require_readable
from autotune.records.priors import PriorStudy

PRIORS = ".priors"  # a folder beside the studies' databases
ASIDE, NEW = ".aside", ".part"  # what was set aside; what is being written
FORMAT = 1
STUDY, TRIAL = "prior_study", "prior_trial"  # attributes in Optuna, which hold the records
LOCK_S = 5.0  # how long another search may write before this one goes on without
MOST_STUDIES, MOST_BYTES = 40, 4 * 2**20  # of one journal: when it is larger, the newest studies are written anew


class PriorStore:
    """The journals of a folder of studies: all are read, and this machine's is written.

    Args:
        folder: the folder of the studies.
        tell: called with what the user should know, once for each file that is set aside.
    """

    def __init__(self, folder: Path, tell: Callable[[str], None] = lambda text: None) -> None:
        self._folder = folder / PRIORS
        self._tell = tell
        machine = json.dumps([processor_model(), os.cpu_count()])
        self._own = self._folder / f"{hashlib.sha256(machine.encode()).hexdigest()[:16]}.journal"

    @property
    def files(self) -> list[Path]:
        """The journals that there are."""
        return sorted(self._folder.glob("*.journal"))

    def studies(self) -> list[PriorStudy]:
        """All that is remembered, the newest study first."""
        if not self.files:
            return []
        with self._locked() as is_locked:
            if not is_locked:
                self._tell(f"{self._busy}, so what earlier searches taught is not known for now")
            found = [study for file in self.files for study in self._read(file)] if is_locked else []
        return sorted(found, key=lambda study: study.searched_at, reverse=True)

    def keep(self, study: PriorStudy) -> None:
        """Remember a study, together with what earlier searches of the same task tried besides."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
        with self._locked() as is_locked, contextlib.suppress(OSError):
            if not is_locked:
                return
            with _anew(self._own) as new:
                if self._own.exists():
                    mend(self._own)
                    kept = self._read(self._own)  # sets a broken file aside
                    for earlier in kept:
                        if earlier.name == study.name:
                            study = study.with_trials_of(earlier)
                    self._take_over(kept, study.name, new)
                storage = _open(new)
                if study.name in optuna.get_all_study_names(storage):
                    optuna.delete_study(study_name=study.name, storage=storage)
                _write(storage, study)

    def _take_over(self, kept: list[PriorStudy], name: str, new: Path) -> None:
        """Begin a new journal with what this machine's holds, or where that is large, with its newest studies of other names."""
        if not self._own.exists():
            return
        if self._own.stat().st_size <= MOST_BYTES:
            shutil.copyfile(self._own, new)
            return
        newest = sorted(kept, key=lambda one: one.searched_at, reverse=True)
        _write_all(new, [one for one in newest if one.name != name][: MOST_STUDIES - 1])

    def forget(self, name: str | None = None) -> list[str]:
        """Forget a study of this name, or all studies. Nothing of them stays in a journal, and of all studies nothing in one that was set
        aside. The name of a task is enough where one study is of it. Returns the names.

        Raises:
            StudyError: no such study is remembered, or the files cannot be written.
        """
        forgotten: list[str] = []
        try:
            with self._locked() as is_locked:
                if not is_locked:
                    raise StudyError(f"{self._busy}; try again when it is done")
                kept = {file: self._read(file) for file in self.files}
                names = {study.name for studies in kept.values() for study in studies}
                of_task = [one for one in names if one.rpartition(" ")[0] == name]
                whole = of_task[0] if len(of_task) == 1 and name not in names else name
                for file, studies in kept.items():
                    gone = [study.name for study in studies if name is None or study.name == whole]
                    left = [study for study in studies if study.name not in gone]
                    if name is None or (gone and not left):
                        file.unlink(missing_ok=True)
                    elif gone:
                        with _anew(file) as new:
                            _write_all(new, left)
                    forgotten += gone
                for rest in self._rests(set_aside=name is None):
                    rest.unlink()
        except OSError as error:
            raise StudyError(f"{self._folder} cannot be written: {error}; change its permissions") from None
        if name is not None and not forgotten:
            if known := ", ".join(repr(study.name) for study in self.studies()):
                raise StudyError(f"{name!r} is not remembered in {self._folder}; expected one of {known}, or all")
            raise StudyError(f"nothing is remembered in {self._folder}; give the folder of your studies by --folder")
        return forgotten

    def _rests(self, *, set_aside: bool) -> Iterator[Path]:
        """Files that writing which was cut short has left; with `set_aside` also journals that were, but no foreign file."""
        yield from self._folder.glob(f"*{NEW}")
        for file in self._folder.glob(f"*{ASIDE}") if set_aside else []:
            content = file.read_bytes()
            if any(mark.encode() in content for mark in (STUDY, TRIAL)):
                yield file

    @property
    def _busy(self) -> str:
        return f"another search writes to {self._folder}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Hold the folder; false where another search holds it for long. A folder that cannot be written needs no lock."""
        lock = filelock.FileLock(self._folder / "lock")
        is_locked = True
        try:
            lock.acquire(timeout=LOCK_S)
        except filelock.Timeout:
            is_locked = False
        except OSError:
            pass
        try:
            yield is_locked
        finally:
            lock.release()

    def _read(self, file: Path) -> list[PriorStudy]:
        """The studies of a journal. One that is broken, or not ours, is set aside."""
        try:
            storage = _open(file)
            studies = storage.get_all_studies()
            ours = [one for one in studies if STUDY in one.user_attrs]  # another one was cut short while it was written
            if not ours and file.stat().st_size:  # Optuna passes over a last line that it cannot read
                raise ValueError("it holds nothing that a search has left")
            return [_study_of(one.user_attrs, storage.get_all_trials(one._study_id, deepcopy=False)) for one in ours]
        except OSError as error:
            self._tell(f"what earlier searches taught cannot be read: {error}")
        except StudyError as error:  # a later version wrote it, which may be in use beside this one
            self._tell(str(error))
        except Exception as error:  # whatever Optuna makes of a file that is no journal
            aside = _free_name(file.with_suffix(ASIDE))
            self._tell(
                f"what earlier searches taught cannot be read ({in_one_line(error)}): {file} is set aside as {aside.name}, and later "
                "searches begin anew"
            )
            with contextlib.suppress(OSError):
                os.replace(file, aside)
        return []


def _free_name(file: Path) -> Path:
    """The name, or the first of those that count on from it which no file has: what was set aside before is kept."""
    others = (file.with_stem(f"{file.stem}.{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([file], others) if not one.exists())


def _open(file: Path) -> JournalStorage:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return JournalStorage(JournalFileBackend(str(file)))


@contextlib.contextmanager
def _anew(file: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of `file`: that one stays as it is where writing is cut short."""
    new = file.with_suffix(NEW)
    new.unlink(missing_ok=True)
    yield new
    os.replace(new, file)


def _write_all(file: Path, studies: list[PriorStudy]) -> None:
    """Write a new journal, so that nothing else stays in it. A journal itself only grows."""
    storage = _open(file)
    for study in studies:
        _write(storage, study)


def _write(storage: JournalStorage, study: PriorStudy) -> None:
    """A study as Optuna has it: the value is the speed over the baseline's, the parameters are what its trials vary."""
    made = optuna.create_study(storage=storage, study_name=study.name, direction="maximize")
    choices = {name: list(dict.fromkeys(trial.config[name] for trial in study.trials)) for name in study.baseline}
    varied = {name: CategoricalDistribution(found) for name, found in choices.items() if len(found) > 1}
    for trial in study.trials:
        data = trial.to_dict()
        del data["config"]
        made.add_trial(
            create_trial(
                state=TrialState.COMPLETE,
                value=trial.speed,
                params={name: trial.config[name] for name in varied},
                distributions=dict(varied),
                user_attrs={TRIAL: data},
            )
        )
    about = study.to_dict()
    del about["trials"]
    made.set_user_attr(STUDY, {"format": FORMAT, **about})  # last: a study without it was cut short


def _study_of(attributes: Mapping[str, Any], trials: list[FrozenTrial]) -> PriorStudy:
    """Raises KeyError, TypeError or ValueError for what is not ours, StudyError for what a later version wrote."""
    about = attributes[STUDY]
    require_readable("what earlier searches taught", about["format"], FORMAT)
    told = [{**trial.user_attrs[TRIAL], "config": {**about["baseline"], **trial.params}} for trial in trials]
    return PriorStudy.from_dict({**about, "trials": told})
