"""`kvd plan`: what fits, before anything is loaded.

Purpose: read the words, find model and memory (or ask a server that runs), print the plan. Invariant: no weights are
read, nothing is downloaded, nothing is started. Exit code 0 where it fits, 1 where it does not.
"""

from __future__ import annotations

import http.client
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from kvd.errors import StartupError
from kvd.server.snapshot_json import decode_snapshot
from kvd.tools.bench_client import is_loopback
from kvd.tools.plan_options import PlanOptions, parse
from kvd.tools.plan_report import PlanReport, of_model, of_server
from kvd.tools.plan_text import lines
from kvd.views import Snapshot

ANSWER_SECONDS = 10.0
MAX_SNAPSHOT_BYTES = 16 << 20


def run(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Print a plan; returns the exit code."""
    options = parse(words, environment)
    report = make_report(options)
    if options.chart is not None:
        _write_chart(options.chart, report)
    is_ascii = "utf" not in (sys.stdout.encoding or "").lower()
    if options.as_json:
        print(json.dumps(report.as_dict(), indent=2, ensure_ascii=is_ascii))
    else:
        text = "\n".join(lines(report, is_ascii=is_ascii))
        print(text.encode("ascii", errors="replace").decode() if is_ascii else text)
    asked_fits = report.asked is None or report.asked.fits
    return 0 if not report.fits.refusal and asked_fits else 1


def make_report(options: PlanOptions) -> PlanReport:
    """Raises KvdError's children, one line each."""
    if options.source is not None:
        return of_server(_ask(options.source, options.api_key), options.source, options)
    from kvd.tools.plan_machine import find_machine
    from kvd.tools.plan_model import by_numbers, find_model

    machine = find_machine(options.config, options.gpu, options.memory_bytes)
    if options.numbers is not None:
        model = by_numbers(options.numbers, options.config)
    else:
        model = find_model(options.config, options.config.home_path)
    return of_model(model, machine, options)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for the server that was named, and for no other."""

    def redirect_request(self, *_: object) -> None:
        return None


def _write_chart(name: str, report: PlanReport) -> None:
    from kvd.tools.plan_picture import draw

    try:
        Path(name).write_text(draw(report), encoding="utf-8")
    except OSError as error:
        raise StartupError(f"--chart: {name}: {error.strerror or error}") from None


def _ask(root: str, api_key: str | None) -> Snapshot:
    """The snapshot of a server. Raises StartupError, one line."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    handlers: list[urllib.request.BaseHandler] = [_NoRedirect()]
    if is_loopback(urlsplit(root).hostname or ""):
        handlers.append(urllib.request.ProxyHandler({}))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(
            urllib.request.Request(f"{root}/kvd/snapshot", headers=headers), timeout=ANSWER_SECONDS
        ) as response:
            return decode_snapshot(response.read(MAX_SNAPSHOT_BYTES))
    except urllib.error.HTTPError as error:
        error.close()
        remedy = "; --api-key, or KVD_API_KEY in the environment" if error.code == 401 else "; is it a kvd server?"
        raise StartupError(f"--from: {root} answered {error.code}{remedy}") from None
    except msgspec.MsgspecError as error:
        raise StartupError(f"--from: {root} sent no snapshot of kvd ({error})") from None
    except http.client.HTTPException as error:
        raise StartupError(f"--from: {root} sent no HTTP answer ({type(error).__name__})") from None
    except (OSError, ValueError) as error:
        raise StartupError(f"--from: {root} does not answer ({getattr(error, 'reason', error)})") from None
