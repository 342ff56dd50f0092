"""A study as one page that needs no network, for a colleague who does not know autotune."""

from __future__ import annotations

from html import escape

from autotune.records.objective import OBJECTIVES
from autotune.report.html import STYLE, body
from autotune.report.plots import pictures, why_no_pictures
from autotune.report.sections import Section, pairs
from autotune.report.study import machine_facts, study_sections
from autotune.study.reading import Study

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}
body {{ margin: 0 auto; max-width: 66em; padding: 1em 1.2em 4em; }}
h1 {{ font-size: 1.6em; margin: .4em 0; }}
.picture {{ break-inside: avoid; }} .picture svg {{ height: auto; max-width: 100%; }}
</style>
</head>
<body class="autotune">
<h1>{title}</h1>
<p class="note">{lead}</p>
{answer}
{pictures}
{rest}
</body>
</html>
"""
_LEAD = (
    "autotune looked for the configuration that trains this model {aim} on this machine within its memory. It trained each "
    "candidate for a few steps in a process of its own (a probe), and then compared the best few with the baseline, which "
    "is what was run before, in fresh processes that took turns (the play-off)."
)
_FIRST = (  # before the pictures
    "No newer answer",
    "Answer",
    "No answer",
    "No answer yet",
    "Recommended config",
    "Play-off",
    "Measured",
    "Play-off without an answer",
)


def render(study: Study) -> str:
    """The page: answer, pictures (if matplotlib is installed), reasons, how to run the answer, every probe, and the machine."""
    headline, *sections = study_sections(study, model=study.facts.model)
    first = [section for section in sections if section.title in _FIRST]
    later = [section for section in sections if section not in first and section.title != "Probes"]
    probes = [section for section in sections if section.title == "Probes"]
    aim = OBJECTIVES[study.facts.objective].aim
    machine = Section("Machine and versions", (pairs(machine_facts(study)),), "as the search found them")
    return _PAGE.format(
        title=escape(f"{study.name}: how to train it {aim}"),
        style=STYLE,
        lead=escape(_LEAD.format(aim=aim)),
        answer=body([*first[:1], Section("", headline.blocks), *first[1:]]),
        pictures=_pictures(study),
        rest=body([*later, *probes, machine]),
    )


def _pictures(study: Study) -> str:
    """The pictures, or why there are none."""
    if reason := why_no_pictures():
        return f'<p class="note">No pictures: {escape(reason)}.</p>'
    return "\n".join(f'<div class="picture"><h2>{escape(title)}</h2>{svg}</div>' for title, svg in pictures(study))
