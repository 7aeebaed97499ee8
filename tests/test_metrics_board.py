"""Grafana board and alert rules: every expression is PromQL, about series that a busy server really exports."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvd.config import SETTINGS
from kvd.device_facts import DeviceFacts, HostFacts
from kvd.observe.metrics import MetricsExporter
from kvd.observe.metrics_own import EVICTION_REASONS, MISS_CAUSES
from kvd.server.snapshot_json import decode_snapshot
from kvd.views import DiskFacts
from tests.model.checkpoints import make_llama
from tests.test_serve import OPENER, WAIT_SECONDS, Process

ROOT = Path(__file__).resolve().parent.parent
BOARD = json.loads((ROOT / "packaging" / "grafana" / "kvd.json").read_text(encoding="utf-8"))
RULES = yaml.safe_load((ROOT / "packaging" / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
DOCUMENT = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
TARGET_LABELS = {"job", "instance"}  # Prometheus adds them to what it scrapes
CARD = DeviceFacts("card", 0.5, 1, 1, 1, 1.0, 1.0, 1.0, 1.0, 1.0, ("heat",))
HOST = HostFacts("cpu", 2, 0.5, 0.5, 1, 1, 1)
ANSWER_TOKENS = 64


def panels() -> list[dict[str, Any]]:
    return [panel for panel in BOARD["panels"] if panel["type"] != "row"]


def alerts() -> list[dict[str, Any]]:
    return [rule for group in RULES for rule in group["rules"]]


def plain(expression: str) -> str:
    """PromQL as Grafana sends it: variables filled in."""
    return expression.replace("$__rate_interval", "1m").replace("$model", ".*").replace("$instance", ".*")


EXPRESSIONS = {
    **{f"{panel['title']} {target['refId']}": target["expr"] for panel in panels() for target in panel["targets"]},
    **{rule["alert"]: rule["expr"] for rule in alerts()},
}


# --------------------------------------------------------------------------- what a busy server exports


@dataclass(frozen=True)
class Exported:
    """Sample name → label → its values; and the kind of every family."""

    labels: dict[str, dict[str, set[str]]]
    kinds: dict[str, str]

    @classmethod
    def read(cls, *texts: str) -> Exported:
        exported = cls({}, {})
        for text in texts:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    known = exported.labels.setdefault(sample.name, {})
                    exported.kinds[sample.name] = family.type
                    for label, value in sample.labels.items():
                        known.setdefault(label, set()).add(value)
        return exported


def ask(url: str) -> str:
    with OPENER.open(url, timeout=WAIT_SECONDS) as response:
        return str(response.read().decode())


def value_of(text: str, name: str, **labels: str) -> float:
    """The only sample of that name with these labels."""
    (value,) = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return float(value)


def complete(url: str, prompt: str, max_tokens: int) -> None:
    body = {"model": "*", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with OPENER.open(request, timeout=WAIT_SECONDS) as response:
        response.read()


@dataclass(frozen=True)
class Scrapes:
    """`/metrics` while one request ran and others waited, after all had ended, and a snapshot of then."""

    busy: str
    after: str
    snapshot: str
    num_answers: int


@pytest.fixture(scope="module")
def scrapes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scrapes]:
    """A real server with all tiers, of which one request at a time gets its turn."""
    folder = tmp_path_factory.mktemp("board")
    model = make_llama(folder / "model")
    words = (
        "--max-num-seqs",
        "1",
        "--kv-cache-memory-bytes",
        "32MiB",
        "--disk-cache",
        f"path={folder / 'blocks'},size=64MiB",
        "--served-model-name",
        "*",
    )
    server = Process(folder, str(model), "--no-dashboard", "--port", "0", *words)
    try:
        url = server.url()
        prompt = "the same beginning of every prompt " * 4
        is_seen, answered = threading.Event(), list[int]()

        def ask_until_seen(number: int) -> None:
            while not is_seen.is_set():
                complete(url, f"{prompt}{number}", ANSWER_TOKENS)
                answered.append(number)

        threads = [threading.Thread(target=ask_until_seen, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + WAIT_SECONDS
        busy = ask(f"{url}/metrics")
        while not (value_of(busy, "kvd:oldest_waiting_seconds") and value_of(busy, "kvd:waste_tokens")):
            assert time.monotonic() < deadline, busy
            assert any(thread.is_alive() for thread in threads), "every request failed"
            busy = ask(f"{url}/metrics")
        is_seen.set()
        for thread in threads:
            thread.join(WAIT_SECONDS)
        yield Scrapes(busy, ask(f"{url}/metrics"), ask(f"{url}/kvd/snapshot"), len(answered))
    finally:
        server.stop(signal.SIGTERM)


@pytest.fixture(scope="module")
def exported(scrapes: Scrapes) -> Exported:
    """What that server exports, and what it would export besides with a GPU and a system that tells everything."""
    snapshot = replace(decode_snapshot(scrapes.snapshot), device=CARD, host=HOST)
    return Exported.read(scrapes.after, MetricsExporter().render(snapshot).decode())


def test_the_numbers_of_a_busy_server(scrapes: Scrapes) -> None:
    busy, after = scrapes.busy, scrapes.after
    assert value_of(busy, "kvd:healthy") == value_of(after, "kvd:healthy") == 1
    assert value_of(busy, "vllm:num_requests_waiting") > 0
    assert 0 < value_of(busy, "kvd:fragmentation") < 1
    assert value_of(after, "kvd:oldest_waiting_seconds") == value_of(after, "kvd:waste_tokens") == 0
    assert value_of(after, "kvd:stalled_seconds") == 0
    assert value_of(after, "vllm:generation_tokens_total") == scrapes.num_answers * ANSWER_TOKENS
    assert value_of(after, "kvd:saved_bytes_total") > 0
    assert value_of(after, "kvd:save_seconds_total") > 0
    assert value_of(after, "kvd:blocks", tier="disk") > 0
    found = [value_of(after, "kvd:prefix_hit_tokens_total", source=source) for source in ("pool", "ram", "disk")]
    assert sum(found) == value_of(after, "vllm:prefix_cache_hits_total") > 0
    assert value_of(after, "kvd:block_reuse_gap_seconds_count") > 0


def test_every_vllm_series_has_the_labels_that_its_boards_expect(exported: Exported) -> None:
    names = [name for name in exported.labels if name.startswith("vllm:")]
    assert len(names) > 20
    assert not [name for name in names if not {"model_name", "engine"} <= exported.labels[name].keys()]


# --------------------------------------------------------------------------- PromQL


def selectors(expression: str) -> list[tuple[promql_parser.VectorSelector, bool]]:
    """Every selector of an expression, with whether it has a range."""
    found = []

    def visit(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            found.append((node.vector_selector, True))
        elif isinstance(node, promql_parser.VectorSelector):
            found.append((node, False))

    promql_parser.walk(promql_parser.parse(plain(expression)), visit)
    ranged = {str(selector) for selector, has_range in found if has_range}
    return [pair for pair in found if pair[1] or str(pair[0]) not in ranged]


def grouping_labels(expression: str) -> set[str]:
    """Labels in `by`, `without`, `on`, `ignoring` and `group_left`."""
    found: set[str] = set()

    def visit(node: promql_parser.Expr) -> None:
        modifier = getattr(node, "modifier", None)
        if isinstance(node, promql_parser.AggregateExpr) and modifier is not None:
            found.update(modifier.labels)
        elif isinstance(node, promql_parser.BinaryExpr) and modifier is not None:
            found.update(modifier.group_labels or ())
            if modifier.matching is not None:
                found.update(modifier.matching.labels)

    promql_parser.walk(promql_parser.parse(plain(expression)), visit)
    return found


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_asks_for_what_is_exported(name: str, exported: Exported) -> None:
    expression = EXPRESSIONS[name]
    known_labels = set(TARGET_LABELS)
    found = selectors(expression)
    assert found
    for selector, has_range in found:
        if selector.name == "up":
            continue
        labels = exported.labels.get(selector.name)
        assert labels is not None, f"nothing exports {selector.name}"
        known_labels |= labels.keys()
        assert has_range == (exported.kinds[selector.name] in ("counter", "histogram")), selector.name
        for matcher in selector.matchers.matchers:
            if matcher.name in TARGET_LABELS:
                continue
            values = labels.get(matcher.name)
            assert values is not None, f"{selector.name} has no label {matcher.name}"
            for value in [] if matcher.value == ".*" else matcher.value.split("|"):
                assert value in values, f"{selector.name} has no {matcher.name}={value}"
    assert grouping_labels(expression) <= known_labels | {"le"}


def test_the_check_would_notice(exported: Exported) -> None:
    """What keeps the test above from passing whatever is written."""
    with pytest.raises(ValueError, match=r"unclosed|unexpected|invalid"):
        selectors("sum(rate(kvd:steps_total[1m])")
    ((selector, has_range),) = selectors('rate(kvd:evictions_total{reason="capacity"}[5m])')
    assert selector.name in exported.labels
    assert has_range
    assert [matcher.name for matcher in selector.matchers.matchers] == ["reason"]
    assert grouping_labels("sum by (tier) (a) / on (job) group_left (x) b") == {"tier", "job", "x"}
    assert "kvd:no_such" not in exported.labels
    assert exported.labels["kvd:reuse_lost_tokens_total"]["cause"] == set(MISS_CAUSES)


# --------------------------------------------------------------------------- the board


def test_the_board_can_be_imported() -> None:
    assert BOARD["id"] is None, "Grafana gives the number"
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", BOARD["uid"])
    numbers = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(numbers)) == len(numbers)
    source, *variables = BOARD["templating"]["list"]
    assert (source["type"], source["query"], source["name"]) == ("datasource", "prometheus", "datasource")
    for each in (*variables, *panels(), *(target for panel in panels() for target in panel["targets"])):
        assert each["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len({panel["title"] for panel in panels()}) == len(panels())
    assert all(panel["description"] for panel in panels())


def test_panels_lie_beside_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + across, place["y"] + down) for across in range(place["w"]) for down in range(place["h"])}
        assert not taken & cells, panel["title"]
        taken |= cells


def test_variables_ask_for_what_is_exported(exported: Exported) -> None:
    for variable in BOARD["templating"]["list"][1:]:
        match = re.fullmatch(r"label_values\((.+), ([a-z_]+)\)", variable["query"]["query"])
        assert match
        ((selector, _),) = selectors(match[1])
        assert match[2] in exported.labels[selector.name].keys() | TARGET_LABELS


def test_legends_name_labels_that_are_left() -> None:
    for panel in panels():
        for target in panel["targets"]:
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert named <= grouping_labels(target["expr"]), target["legendFormat"]


# --------------------------------------------------------------------------- the rules


def test_rules_have_the_form_of_prometheus() -> None:
    for group in RULES:
        assert group.keys() == {"name", "rules"}
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert rule.keys() - {"for"} == {"alert", "expr", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("info", "warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}
        promql_parser.parse_duration(rule.get("for", "1m"))


def test_annotations_say_what_there_is(exported: Exported) -> None:
    """Templates, series and settings that a description names exist."""
    for rule in alerts():
        text = " ".join(rule["annotations"].values())
        labels = set(TARGET_LABELS)
        for selector, _ in selectors(rule["expr"]):
            labels |= exported.labels.get(selector.name, {}).keys()
        assert set(re.findall(r"\$labels\.(\w+)", text)) <= labels
        assert set(re.findall(r"\| (\w+) }}", text)) <= {"humanize", "humanizePercentage", "humanizeDuration"}
        assert text.count("{{") == text.count("}}")
        for series in re.findall(r"(?:kvd|vllm):\w+", text):
            assert series in exported.labels or f"{series}_bucket" in exported.labels, series
        settings = re.findall(r"(?<![:\w.])[a-z]+(?:_[a-z]+)+\b", text)
        assert not [name for name in settings if name not in SETTINGS and name != "max_tokens"], rule["alert"]


def test_a_ratio_is_no_alarm_on_an_idle_server_nor_without_prefix_caching() -> None:
    """0 ÷ 0 is not a number, which no comparison holds for; and a single prompt in an hour is no trend."""
    ratios = [rule for rule in alerts() if "/" in rule["expr"]]
    assert [rule["alert"] for rule in ratios] == ["KvdLowHitRate", "KvdNoReuse", "KvdReuseLost"]
    for rule in ratios:
        (window,) = set(re.findall(r"\[(\w+)\]", rule["expr"]))
        guard = rf"\band (on \([a-z_, ]+\) )?rate\(vllm:prefix_cache_queries_total\[{window}\]\) > 10$"
        assert re.search(guard, rule["expr"].strip()), rule["alert"]


def test_thresholds_have_the_unit_of_their_series() -> None:
    for rule in alerts():
        for name, limit in re.findall(r"([a-z:_]+) [<>] ([0-9.]+)", rule["expr"]):
            if name.endswith(("_perc", "_rate", "_utilization")):
                assert 0 < float(limit) < 1, rule["alert"]
            elif name.endswith("_seconds"):
                assert float(limit) >= 1, rule["alert"]


def test_the_document_lists_every_alert() -> None:
    (table,) = re.findall(r"\| alert \| when \|\n\|---\|---\|\n((?:\|.*\n)+)", DOCUMENT)
    assert re.findall(r"`(Kvd\w+)`", table) == [rule["alert"] for rule in alerts()]


# --------------------------------------------------------------------------- what no scrape above shows


def rendered(scrapes: Scrapes, problem: str | None = None, **changes: Any) -> str:
    return MetricsExporter().render(replace(decode_snapshot(scrapes.snapshot), **changes), problem=problem).decode()


def test_healthy_says_what_the_health_route_says(scrapes: Scrapes) -> None:
    assert value_of(rendered(scrapes), "kvd:healthy") == 1
    assert value_of(rendered(scrapes, "no progress for 130 s"), "kvd:healthy") == 0
    assert value_of(rendered(scrapes, state="draining"), "kvd:healthy") == 0


def test_misses_evictions_and_problems_have_their_numbers(scrapes: Scrapes) -> None:
    counters = replace(decode_snapshot(scrapes.snapshot).counters, evicted_blocks=(("cap", 3), ("reset", 4)))
    text = rendered(
        scrapes,
        counters=counters,
        misses=(("volatile_line", 2, 700), ("new", 5, 0)),
        disk=DiskFacts(1, 2, 3, 4, 5, 6, "no space left"),
    )
    assert value_of(text, "kvd:misses_total", cause="volatile_line") == 2
    assert value_of(text, "kvd:reuse_lost_tokens_total", cause="volatile_line") == 700
    assert value_of(text, "kvd:reuse_lost_tokens_total", cause="reordered") == 0, "so that a rate sees the first one"
    reasons = {reason: value_of(text, "kvd:evictions_total", reason=reason) for reason in EVICTION_REASONS}
    assert reasons == {"capacity": 0, "cap": 3, "dropped": 0, "reset": 4}
    names = ("disk_bytes", "disk_max_bytes", "disk_written_bytes_total", "disk_read_bytes_total")
    assert [value_of(text, f"kvd:{name}") for name in names] == [2, 3, 4, 5]
    assert value_of(text, "kvd:disk_corrupt_blocks_total") == 6
    assert value_of(text, "kvd:disk_problem") == 1
    assert value_of(rendered(scrapes), "kvd:disk_problem") == 0


def test_an_older_engine_says_how_many_had_to_give_way(scrapes: Scrapes) -> None:
    counters = replace(decode_snapshot(scrapes.snapshot).counters, evicted_blocks=(), num_evicted_blocks=9)
    assert value_of(rendered(scrapes, counters=counters), "kvd:evictions_total", reason="capacity") == 9
