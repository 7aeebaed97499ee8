"""A plan as lines for people: where the memory goes as a bar, what fits as a table and as bars."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from kvd.core import BLOCK_SIZE
from kvd.geometry import HOST_SETTING
from kvd.tools.banner import size
from kvd.tools.plan_report import PlanReport, column_of

BAR_CELLS = 44
TEXT_COLUMNS = 80
SHORT_DTYPES = {"fp8_e4m3": "fp8", "int8": "int8", "fp16": "fp16/bf16"}


def lines(report: PlanReport, *, is_ascii: bool = False) -> list[str]:
    """The whole plan; no line is wider than `TEXT_COLUMNS`, but for a name that is. is_ascii: bars of plain letters."""
    subject, fits, geometry = report.subject, report.fits, report.geometry
    shape = geometry.shape
    kind = "MHA" if shape.num_kv_heads == shape.num_heads else "MQA" if shape.num_kv_heads == 1 else "GQA"
    windows = "".join(
        f", {count} of them with a window of {window:,} tokens" for window, count in shape.layer_windows if window
    )
    out = [
        *_wrapped(f"{subject.model} ({subject.quantization}, by {subject.source}) on {subject.machine}"),
        *_wrapped(
            f"  {shape.num_layers} layers{windows}, {shape.num_kv_heads} of {shape.num_heads} heads have keys and "
            f"values ({kind}), head_dim {shape.head_dim}, up to {shape.max_positions:,} tokens"
        ),
        "",
    ]
    if fits.refusal:
        out += [*_wrapped(f"does not fit: {fits.refusal}"), ""]
    out += [*_memory(report, is_ascii=is_ascii), "", *_table(report), ""]
    out += _chart(report, is_ascii=is_ascii)
    for line in _advice(report):
        out += _wrapped(line)
    out.append("")
    for note in subject.notes:
        out += _wrapped(f"  {note}")
    return [line.rstrip() for line in out]


def _wrapped(text: str) -> list[str]:
    """A paragraph; its further lines are indented by two more than its first one."""
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, TEXT_COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _memory(report: PlanReport, *, is_ascii: bool) -> list[str]:
    fits, room = report.fits, report.geometry.room
    is_host = room.setting == HOST_SETTING
    parts = [
        ("weights", fits.weight_bytes, "W"),
        ("activations", fits.step_bytes, "A"),
        ("KV cache", fits.kv_bytes, "K"),
    ]
    rest = max(0, room.total_bytes - sum(num_bytes for _, num_bytes, _ in parts))
    parts.append(("left for others" if is_host else "not taken", rest, "."))
    rows = []
    for name, num_bytes, letter in parts:
        share = num_bytes / room.total_bytes if room.total_bytes else 0.0
        extra = ""
        if letter == "K":
            extra = f"   {fits.num_blocks:,} blocks of {BLOCK_SIZE} tokens, {fits.choice.kv_cache_dtype}"
        elif letter == "W" and report.subject.file_bytes:
            extra = f"   {report.subject.file_bytes / 1e9:.2f} GB on disk"
        rows.append(f"  {letter} {name:<16}{size(num_bytes):>11}  {share:>4.0%}{extra}")
    title = "of free RAM" if is_host else "on the card"
    return [f"memory: {size(room.total_bytes)} {title}", f"  {_split([(b, c) for _, b, c in parts], is_ascii)}", *rows]


def _split(parts: Sequence[tuple[int, str]], is_ascii: bool) -> str:
    """A bar in which every part that is there has at least a cell."""
    total = sum(num_bytes for num_bytes, _ in parts)
    if not total:
        return ""
    cells = [max(1, round(BAR_CELLS * num_bytes / total)) if num_bytes else 0 for num_bytes, _ in parts]
    cells[cells.index(max(cells))] += BAR_CELLS - sum(cells)
    letters = "".join(letter * count for (_, letter), count in zip(parts, cells, strict=True))
    return f"[{letters}]" if is_ascii else f"▕{letters.replace('.', '·')}▏"


def _table(report: PlanReport) -> list[str]:
    """Bytes per token, and requests at once, by KV dtype."""
    here = report.geometry.kv_dtypes
    mark = column_of(report.fits.choice.kv_cache_dtype)
    heads = [
        f"{SHORT_DTYPES[each.choice.kv_cache_dtype]}{' *' if each.choice.kv_cache_dtype == mark else ''}"
        for each in report.by_dtype
    ]
    is_here = [each.choice.kv_cache_dtype in here for each in report.by_dtype]
    rows = [["KV cache by dtype", *heads]]
    rows.append(["bytes per token", *(f"{each.bytes_per_token:,.0f}" for each in report.by_dtype)])
    longest = [f"{each.largest_len:,}" if ok else "-" for each, ok in zip(report.by_dtype, is_here, strict=True)]
    rows.append(["largest max_model_len", *longest])
    for length in report.contexts:
        counts = [
            f"{each.requests(length):,}" if ok else "-" for each, ok in zip(report.by_dtype, is_here, strict=True)
        ]
        served = " < max_model_len" if length == report.fits.max_model_len else ""
        rows.append([f"requests of {length:,} tokens", *counts, served])
    out = [f"  {row[0]:<26}" + "".join(f"{cell:>12}" for cell in row[1:4]) + "".join(row[4:]) for row in rows]
    out.append("  * is set; - is not served there" if not all(is_here) else "  * is set")
    return out


def _chart(report: PlanReport, *, is_ascii: bool) -> list[str]:
    """Requests at once by context, on a scale of powers."""
    rows = [(length, report.fits.requests(length)) for length in report.contexts if length <= report.fits.max_model_len]
    rows = [(length, count) for length, count in rows if count]
    if not rows:
        return []
    most = max(count for _, count in rows)
    out = [f"requests at once by context, {report.fits.choice.kv_cache_dtype} (bars grow with the logarithm)"]
    for length, count in rows:
        cells = 1 if most == 1 else 1 + round((BAR_CELLS - 1) * math.log(count) / math.log(most))
        out.append(f"  {length:>9,}  {('#' if is_ascii else '█') * cells} {count:,}")
    return [*out, ""]


def _advice(report: PlanReport) -> list[str]:
    fits, advice = report.fits, report.recommendation
    out = []
    if not fits.refusal:
        out.append(
            f"max_model_len {fits.max_model_len:,} is served, {report.unasked.largest_len:,} is the largest that fits; "
            f"the KV cache gets {report.kv_share:.0%} of the memory"
        )
    if fits.warning:
        out.append(f"warning: {fits.warning}")
    if report.asked is not None:
        asked = report.asked
        requests = f"{asked.num_requests:,} requests of {asked.num_tokens:,} tokens"
        if asked.is_too_long:
            longest = f"max_model_len {fits.max_model_len:,}"
            if asked.num_tokens > fits.max_positions:
                longest = f"the model's {fits.max_positions:,} positions"
            out.append(f"{requests} do not fit: each is longer than {longest}")
        else:
            most = fits.choice.max_num_seqs
            at_once = f"; max_num_seqs lets {most:,} of them run at once" if most < asked.num_requests else ""
            out.append(
                f"{requests} {'fit' if asked.fits else 'do not fit'}: they take {size(asked.kv_bytes)} of KV cache, "
                f"there are {size(fits.kv_bytes)}, room for {asked.num_fitting:,}{at_once}"
            )
    if report.seen is not None:
        seen = report.seen
        at_least = "at least " if seen.prompt.is_at_least or seen.answer.is_at_least else ""
        out.append(
            f"seen: prompts of {seen.prompt.p50:,} / {seen.prompt.p90:,} / {seen.prompt.p99:,} tokens and answers of "
            f"{seen.answer.p50:,} / {seen.answer.p90:,} / {seen.answer.p99:,} (p50 / p90 / p99), {at_least}"
            f"{seen.total('p99'):,} together at the p99"
        )
    if not fits.refusal and advice.expected_tokens <= fits.max_positions:
        length = f"--max-model-len {advice.max_model_len} " if advice.max_model_len is not None else ""
        out.append(
            f"recommended: {length}--max-num-seqs {advice.max_num_seqs}, for requests of about "
            f"{advice.expected_tokens:,} tokens ({advice.why})"
        )
    return out
