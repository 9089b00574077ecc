"""A pair's model card in Markdown, made from the report of an evaluation and never typed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dragoman.errors import PairError

_HEADLINES = (
    ("reference_fve", "AR FVE from reference explanations"),
    ("reference_fve_mean_direction", "the same, denominator: direction of the mean"),
    ("reference_shuffled_fve", "control: reference of another document"),
    ("round_trip_fve", "Round-trip FVE, vector → own words → vector"),
    ("round_trip_fve_mean_direction", "the same, denominator: direction of the mean"),
    ("round_trip_cosine", "round-trip cosine"),
    ("round_trip_cosine_centred", "round-trip cosine without the mean"),
    ("round_trip_shuffled_fve", "control: own words about another document's vector"),
    ("zero_vector_fve", "control: what the AV says about the zero vector"),
    ("mean_vector_fve", "control: what the AV says about the mean vector"),
    ("av_gap", "AV gap over all response tokens"),
    ("av_gap_content", "AV gap over the tokens between the tags"),
    ("round_trip_top1", "retrieval from the AV's own words, first"),
    ("round_trip_top5", "retrieval from the AV's own words, first five"),
    ("round_trip_mrr", "retrieval from the AV's own words, mean reciprocal rank"),
    ("reference_top1", "retrieval from reference explanations, first"),
    ("truncated", "explanations cut off at the token limit"),
    ("repeated", "explanations said about another vector word for word"),
)

_DEFAULT_USE = (
    "Reading, in words, what the output of one block of one model holds at one token, and seeing by the "
    "score how much of the vector the words carry. For study and for teaching, on text like that of the "
    "corpora it was trained on."
)
_DEFAULT_LIMITS = (
    "A verbalizer confabulates: a fluent sentence is no evidence. Look at the score, and at the control "
    "figures above, before believing a reading.",
    "It reads one layer of one model, at positions and on text like those it was trained on; elsewhere the "
    "figures above do not hold.",
    "What the words leave out is not thereby absent from the vector: FVE says how much is left out.",
    "Figures are averages over vectors; the score of a single reading scatters widely around them.",
)
_NEEDED_META = ("name", "subject", "layer_index", "reproduce")


def render_model_card(report: Mapping[str, Any], *, pair_meta: Mapping[str, Any]) -> str:
    """The model card of a pair.

    Args:
        report: the JSON of `dragoman evaluate PAIR --suite fve --json` (or `FveReport.to_json()` with a
            `provenance` beside it); figures are taken from here alone.
        pair_meta: what the report cannot know. `name`, `subject`, `layer_index` and `reproduce` (a list of
            commands) are needed; `licence`, `revision`, `data`, `training` (mappings of plain values),
            `calibration` (the threshold in the sidecar, as `Calibration.to_json`), `format` (prose: what an
            explanation looks like), `intended_use` (prose) and `limits` (a list of
            sentences, put before the general ones) are optional.

    Raises:
        PairError: a figure or an entry of `pair_meta` is missing.
    """
    _check_complete(report, pair_meta)
    front = {
        "base_model": pair_meta["subject"],
        "license": pair_meta.get("licence", "see the base model"),
        "tags": ["natural-language-autoencoder", "interpretability"],
    }
    sections = [
        "---\n" + "\n".join(f"{key}: {_yaml(value)}" for key, value in front.items()) + "\n---",
        f"# {pair_meta['name']}",
        _summary(report, pair_meta),
        "## Measured\n\n" + _measured(report),
        *(
            f"## {title}\n\n{_facts(pair_meta[key])}"
            for title, key in (("Data", "data"), ("Training", "training"))
            if pair_meta.get(key)
        ),
        "## Intended use\n\n" + str(pair_meta.get("intended_use", _DEFAULT_USE)),
        "## Limits\n\n" + _list([*pair_meta.get("limits", ()), *_DEFAULT_LIMITS]),
        "## How to reproduce\n\n```sh\n" + "\n".join(map(str, pair_meta["reproduce"])) + "\n```",
        "## Provenance\n\n" + _facts(report.get("provenance", {})),
    ]
    return "\n\n".join(sections) + "\n"


def _check_complete(report: Mapping[str, Any], pair_meta: Mapping[str, Any]) -> None:
    missing = [name for name, _ in _HEADLINES if name not in report]
    missing += [
        f"pair_meta[{key!r}]"
        for key in ("name", "subject", "layer_index", "reproduce")
        if key not in pair_meta
    ]
    if missing:
        raise PairError(
            f"a model card lacks {', '.join(missing)}",
            expected="every figure of `dragoman evaluate PAIR --suite fve` and the facts of the pair",
            consequence="the card would be silent where a reader takes silence for a good value",
            remedy="evaluate the pair with the fve suite of this version and pass its JSON",
        )


def _summary(report: Mapping[str, Any], pair_meta: Mapping[str, Any]) -> str:
    revision = f" (revision {pair_meta['revision']})" if pair_meta.get("revision") else ""
    prose = (
        f"A natural language autoencoder for **{pair_meta['subject']}**{revision}: a verbalizer (AV) says in "
        f"words what the output of block {pair_meta['layer_index']} (counted from 0) holds at a token, and a "
        "reconstructor (AR) turns the words back into a vector, which proves how much they carry."
    )
    # The threshold that the pair flags by stands in its sidecar; the report's own is the next best.
    threshold = pair_meta.get("calibration") or report["score_threshold"]
    flag = (
        f"Readings that score below {threshold['threshold']:.3f} are flagged `low-score`. That threshold "
        f"tells own from foreign vectors best (Youden's J {threshold['youden_j']:.2f}): it keeps "
        f"{threshold['kept_real']:.0%} of readings held against their own vector and lets "
        f"{threshold['passed_shuffled']:.0%} pass of readings held against another document's "
        f"(n = {threshold['n_real']} each)."
    )
    return "\n\n".join(filter(None, (prose, str(pair_meta.get("format", "")), flag)))


def _measured(report: Mapping[str, Any]) -> str:
    test, settings = report["test_set"], report["settings"]
    temperature = settings["decoding"]["temperature"]
    how = f"sampling at temperature {temperature}" if temperature else "greedy decoding"
    # Of a file that somebody named, nobody here knows whether training saw its documents.
    whose = (
        f"that no stage of training saw (split by document, made again from {test['made_from']})"
        if test.get("made_from")
        else f"of the file {test.get('file', 'given')}"
    )
    raw, direction = report["raw_variance"]["value"], report["normalised_mean"]["value"]
    lead = (
        f"On {test['rows_used']} vectors of {test['documents_used']} documents {whose} (rows "
        f"{test['fingerprint']}), {how}. Intervals are "
        f"{settings['level']:.0%}, by bootstrap over documents ({settings['resamples']} resamples). "
        "FVE = 1 − MSE / denominator with both vectors normalised; the denominators are *raw variance* "
        f"{raw:.4f} (predict the mean; used where nothing is said) and *normalised mean* {direction:.4f} "
        "(predict the direction of the mean). Retrieval is by mean-centred cosine among "
        f"{settings['pool']} held-out vectors, over {settings['pools']} disjoint pools."
    )
    lines = [
        f"| figure | value | {settings['level']:.0%} interval | n (documents) | compared with |",
        "|---|---|---|---|---|",
        *(_line(title, report[name]) for name, title in _HEADLINES),
    ]
    return lead + "\n\n" + "\n".join(lines)


def _line(title: str, figure: Mapping[str, Any]) -> str:
    unit = f" {figure['unit']}" if figure["unit"] else ""
    low, high = figure["low"], figure["high"]
    interval = "one document: none" if low is None else f"{low:.3f} to {high:.3f}"
    cells = (
        title,
        f"**{figure['value']:.3f}**{unit}",
        interval,
        f"{figure['n']} ({figure['documents']})",
        figure["compared_with"],
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _facts(facts: Mapping[str, Any]) -> str:
    return _list([f"{key.replace('_', ' ')}: {_plain(value)}" for key, value in facts.items()])


def _plain(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(_plain, value))
    return "not known" if value is None else str(value)


def _list(items: Sequence[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def _yaml(value: Any) -> str:
    # A JSON scalar or list of strings is YAML too, whatever characters it holds.
    import orjson

    return orjson.dumps(value).decode()
