"""The façade that server, dashboard and tools see, and the step loop behind it.

Threads. The event loop calls the public methods. One engine thread owns scheduler, cache, runner and statistics, and
nobody else touches them. Commands and questions cross to it through the `Inbox`; token events cross back in one
callback per step; what observers read is a frozen snapshot that the engine thread publishes. When the thread ends,
`_close` is the last thing that crosses: it ends all that still wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from kvd.core import FinishReason, Request, TokenEvent
from kvd.device_facts import DeviceFacts
from kvd.engine.disk_link import DiskLink
from kvd.engine.questions import Questions
from kvd.engine.reporting import OnEvent, Reporter, ignore
from kvd.engine.runner import Runner
from kvd.engine.sessions import Sessions
from kvd.engine.statistics import Statistics
from kvd.engine.streams import TokenStream
from kvd.errors import EngineFailure, KvdError, ServerOverloaded
from kvd.insight import Admission
from kvd.scheduler.scheduler import Scheduler
from kvd.views import EngineInfo, RequestView, Snapshot

WEDGED_AFTER_SECONDS = 120.0
PUBLISH_INTERVAL_SECONDS = 0.05
DETAILS_INTERVAL_SECONDS = 0.25
DETAILS_PATIENCE_SECONDS = 1.0
"""How long a snapshot waits for the request table: an engine that is stuck is just what somebody wants to see."""
IDLE_POLL_SECONDS = 0.02


class Engine(Questions):
    """Runs requests; implements `views.SnapshotSource` and `views.Control`.

    log: receives (level, message) lines, from either thread. disk: the tier that is closed when the engine thread ends.
    device_facts: the latest, at once. on_admission: called on the engine thread, once per step that admitted somebody,
    and on_event for the event log, see `reporting`; both must be quick, and what they raise is logged once.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: Runner,
        *,
        log: Callable[[str, str], None],
        sessions: Sessions | None = None,
        disk: DiskLink | None = None,
        device_facts: Callable[[], DeviceFacts | None] = lambda: None,
        on_admission: Callable[[Sequence[Admission]], None] | None = None,
        on_event: OnEvent = ignore,
        wedged_after_seconds: float = WEDGED_AFTER_SECONDS,
    ) -> None:
        super().__init__(scheduler, sessions)
        self.info = info
        self._device_facts = device_facts
        self._disk = disk
        self._runner = runner
        self._log = log
        scheduler.admissions.receive = on_admission
        self._reporter = Reporter(scheduler, on_event)
        self._wedged_after_seconds = wedged_after_seconds
        self._statistics = Statistics()
        self._streams: dict[str, TokenStream] = {}
        self._state: Literal["loading", "ready", "draining", "failed"] = "loading"
        self._failure = ""
        self._started = self._last_progress = self._last_published = time.monotonic()
        self._is_stopping = False  # engine thread
        self._details: tuple[float, tuple[RequestView, ...]] = (float("-inf"), ())
        self._snapshot = self._take_snapshot()
        self._thread = threading.Thread(target=self._run, name="kvd-engine", daemon=True)

    # ------------------------------------------------------------------ the step loop (engine thread)

    def _step(self) -> None:
        self._finish(self._scheduler.expire())
        runner = self._runner
        unready = runner.unready_requests()
        plan = self._scheduler.plan(unready) if self._has_work else None
        if plan is None and not runner.num_in_flight:  # blocked: only a mask, a command or time can help
            (runner.await_ready if unready else self._inbox.run_all)(IDLE_POLL_SECONDS)
            return
        try:
            if plan is not None:
                runner.launch(plan)
                if runner.num_in_flight <= runner.steps_ahead:
                    return  # it runs while the next one is planned
            landed, result = runner.land()
        except Exception as error:
            self._fail_step(error)
            return
        self._last_progress = time.monotonic()
        events = self._scheduler.commit(landed, result)
        self._reporter.stepped()
        if landed.items:
            self._statistics.step(landed.num_tokens, events, self._last_progress)
        self._deliver(events)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._inbox.run_all(0 if self._has_work else None)
                if self._has_work and not self._is_stopping:
                    self._step()
                self._publish()
            self._write_through()
        except BaseException as error:  # a fault of ours: everybody who waits must hear of it
            self._failure = f"{type(error).__name__}: {error}"
            self._state = "failed"
            self._log("error", f"the engine stopped: {self._failure}")
            self._log("debug", traceback.format_exc())
        finally:
            self._runner.close()
            if self._disk is not None:
                self._disk.close()
            self._call_loop(self._close)

    def _write_through(self) -> None:
        """Hand the disk tier the blocks that the last step has completed, so that a restart finds them."""
        if self._disk is None or self._scheduler.has_work or not self._scheduler.has_moves:
            return
        plan = self._scheduler.plan()
        if plan is not None:
            self._scheduler.commit(plan, self._runner.run(plan))

    @property
    def _has_work(self) -> bool:
        """Requests to run, or blocks to write through when the last of them has ended."""
        return self._scheduler.has_work or self._scheduler.has_moves

    def _fail_step(self, error: Exception) -> None:
        """The runner failed: its blocks may be half written, so every request ends and no cached block stays."""
        # Where the device can compute nothing any more, this raises, and the engine stops.
        message = f"step {self._runner.void()} failed: {type(error).__name__}: {error}"
        self._log("error", message)
        self._log("debug", traceback.format_exc())
        self._last_progress = time.monotonic()
        self._finish(self._scheduler.fail_all(message))
        self._scheduler.cache.drop_cached()

    def _finish(self, events: list[TokenEvent]) -> None:
        """Deliver events of requests that ended outside a step."""
        for event in events:
            self._statistics.ended(event)
        self._deliver(events)

    def _deliver(self, events: list[TokenEvent]) -> None:
        if events:
            # Who has read the end of an answer finds it counted.
            has_ended = any(event.finish_reason for event in events)
            self._publish(at_once=has_ended)
            if has_ended:
                self._reporter.ended(events)
            self._call_loop(lambda: self._dispatch(events))

    def _call_loop(self, callback: Callable[[], None]) -> None:
        if not self._inbox.call_loop(callback):
            self._is_stopping = True

    def _add(self, request: Request) -> None:
        try:
            self._scheduler.add(request)
        except Exception as error:
            event = TokenEvent(
                request.request_id, None, len(request.prompt_token_ids), 0, 0, finish_reason="error", error=str(error)
            )
            self._deliver([event])
            return
        self._statistics.submitted(request)

    def _abort(self, request_id: str, reason: FinishReason) -> bool:
        event = self._scheduler.abort(request_id, reason)
        if event is None:
            return False
        self._finish([event])
        return True

    def _publish(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._last_published >= PUBLISH_INTERVAL_SECONDS or not self._has_work:
            self._last_published = now
            self._snapshot = self._take_snapshot()

    def _take_snapshot(self) -> Snapshot:
        cache = self._scheduler.cache
        disk = None if self._disk is None else self._disk.facts()
        if disk is not None:
            self._reporter.disk(disk)
        return Snapshot(
            time=time.monotonic(),
            uptime_seconds=time.monotonic() - self._started,
            info=self.info,
            state=self._state,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_blocks=cache.num_blocks,
            num_blocks_active=cache.num_blocks_active,
            num_blocks_cached=cache.num_blocks_cached,
            num_blocks_free=cache.num_blocks_free,
            num_blocks_pinned=cache.chains.num_pinned_blocks,
            num_ram_blocks=cache.tiers.ram.num_slots[0],
            num_ram_blocks_used=cache.tiers.ram.num_used(0),
            num_ram_blocks_held=cache.tiers.ram.num_slots[0] - cache.tiers.ram.num_available(0),
            running_limit=self._scheduler.running_limit,
            step_budget=self._scheduler.step_budget,
            counters=self._scheduler.counters(),
            last_step=self._scheduler.last_step,
            histograms=self._statistics.freeze(),
            cache_histograms=cache.ledger.freeze(),
            prefill_tokens_per_second=self._scheduler.rates.prefill_tokens_per_second or 0.0,
            disk=disk,
            num_waste_tokens=self._scheduler.num_waste_tokens,
            oldest_waiting_seconds=self._scheduler.oldest_waiting_seconds,
        )

    def _list_requests(self) -> tuple[RequestView, ...]:
        """The request table, built anew when the latest is too old; those who asked during one step share one."""
        taken, requests = self._details
        if time.monotonic() - taken >= DETAILS_INTERVAL_SECONDS:
            requests = self._scheduler.request_views()
            self._details = (time.monotonic(), requests)
        return requests

    # ------------------------------------------------------------------ life cycle (event loop)

    async def start(self) -> None:
        """Start the engine thread; requests are accepted from now on."""
        self._inbox.open()
        self._state = "ready"
        self._snapshot = self._take_snapshot()
        self._thread.start()

    async def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, give running ones `drain_seconds` to finish, cancel the rest, end the thread."""
        if self._state == "ready":
            self._state = "draining"
        deadline = time.monotonic() + drain_seconds
        while self._streams and self._thread.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        for request_id in list(self._streams):
            self._abort_soon(request_id)
        for _ in range(100):
            if not self._streams or not self._thread.is_alive():
                break
            await asyncio.sleep(0.02)
        self._inbox.put(self._stop_thread)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def wake(self) -> None:
        """Have the engine thread look around, should it be asleep. Any thread."""
        self._inbox.put(lambda: None)

    def _stop_thread(self) -> None:
        self._is_stopping = True

    # ------------------------------------------------------------------ requests (event loop)

    def submit(self, request: Request) -> TokenStream:
        """Queue a request. Raises ServerOverloaded, EngineFailure or what `Scheduler.check` raises."""
        if self._state in ("loading", "draining"):
            raise ServerOverloaded(f"the server is {self._state}; try again later", retry_after_seconds=5)
        if self._state == "failed":
            raise self._stopped_error()
        try:
            self._scheduler.check(request, num_present=len(self._streams))
        except KvdError as error:
            self._reporter.refused(request.request_id, error)
            raise
        assert request.request_id not in self._streams, "request ids are unique"
        if not self._streams:
            self._last_progress = time.monotonic()  # nothing was to be done until now
        stream = TokenStream(request.request_id, self._abort_soon)
        self._streams[request.request_id] = stream
        self._inbox.put(lambda: self._add(request))
        return stream

    def _abort_soon(self, request_id: str, reason: FinishReason = "abort") -> None:
        self._inbox.put(lambda: self._abort(request_id, reason))

    def _dispatch(self, events: list[TokenEvent]) -> None:
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:
                continue
            stream.put(event)
            if event.finish_reason is not None:
                del self._streams[event.request_id]

    def _close(self) -> None:
        """The engine thread has ended: nobody else will answer those who still wait."""
        for request_id in list(self._streams):
            self._dispatch([TokenEvent(request_id, None, 0, 0, 0, finish_reason="error", error=self._failure)])
        self._inbox.close(self._stopped_error)

    def _stopped_error(self) -> EngineFailure:
        return EngineFailure(f"the engine stopped: {self._failure or 'shut down'}")

    # ------------------------------------------------------------------ observers and operators (event loop)

    async def snapshot(self, *, details: bool = False) -> Snapshot:
        """What the engine last published; with details, the request table as of now, 0.25 s ago, or before it hung."""
        if details and self._inbox.is_open:
            taken, requests = self._details
            if time.monotonic() - taken >= DETAILS_INTERVAL_SECONDS:
                with contextlib.suppress(TimeoutError):  # then it is the latest table that there is
                    async with asyncio.timeout(DETAILS_PATIENCE_SECONDS):
                        requests = await self._inbox.ask(self._list_requests)
        else:
            requests = ()
        # An idle engine publishes nothing, and neither does a wedged one; but it ages, and it may be told to stop.
        now, latest = time.monotonic(), self._snapshot
        waiting = latest.oldest_waiting_seconds
        return replace(
            latest,
            state=self._state,
            uptime_seconds=now - self._started,
            requests=requests,
            device=self._device_facts(),
            oldest_waiting_seconds=waiting + now - latest.time if waiting else 0.0,
            stalled_seconds=now - self._last_progress if self._streams else 0.0,
        )

    async def abort(self, request_id: str) -> bool:
        """End a request on an operator's behalf; False when there is none of that id."""
        return await self._inbox.ask(lambda: self._abort(request_id, "abort"))

    def health(self) -> str | None:
        """None when all is well, else one line that says what is not."""
        if self._state == "failed":
            return f"the engine stopped: {self._failure}"
        if self._state != "ready":
            return f"the server is {self._state}"
        idle_for = time.monotonic() - self._last_progress
        if self._streams and idle_for > self._wedged_after_seconds:
            return f"no progress for {idle_for:.0f} s while {len(self._streams)} requests wait"
        return None
