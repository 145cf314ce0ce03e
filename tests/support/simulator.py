"""The simulated provider, run for tests: in a thread (fast) or in a process (can be killed).

    with SimulatorThread() as simulator:
        simulator.fault(match={"method": "POST"}, effect="after", drop=True)
        ...                                     # send to simulator.url
        assert len(simulator.effects(reference="r-1")) == 1

Both have the same methods. They talk to `/_control` over a fresh connection each time, and leave
those out of `connections()`, so that what a test sees there is its own.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from app.providers.simulator.server import serve

_HOST = "127.0.0.1"
_START_SECONDS = 60.0
_ROOT = Path(__file__).resolve().parents[2]


class ControlFailed(Exception):
    """A control request was refused; the message holds status and body."""


class _Simulator:
    """What both variants share: the control interface, and `url` while it runs."""

    def __init__(self, data: Path | None, port: int) -> None:
        self.data = data
        self.port = port

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, without a slash at the end."""
        return f"http://{_HOST}:{self.port}"

    def request_control(self, method: str, path: str, body: object = None) -> Any:
        """One request to `/_control` + `path`; its JSON. Raises `ControlFailed`."""
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=10)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(
                method, f"/_control{path}", payload, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            text = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise ControlFailed(f"{response.status} {text.decode()}")
        return json.loads(text)

    def ledger(self, **filters: str) -> dict[str, Any]:
        """`{"effects", "calls", "connections_without_bytes"}`; filters `reference`, `key`, `kind`."""
        answer: dict[str, Any] = self.request_control("GET", _with_query("/ledger", filters))
        return answer

    def effects(self, reference: str | None = None, **filters: str) -> list[dict[str, Any]]:
        """The effects, oldest first; filters `reference`, `key`, `kind`."""
        if reference is not None:
            filters["reference"] = reference
        effects: list[dict[str, Any]] = self.ledger(**filters)["effects"]
        return effects

    def fault(self, **rule: Any) -> None:
        """Arm one fault rule, its members as in CONTRACT.md."""
        self.request_control("POST", "/faults", rule)

    def faults(self) -> list[dict[str, Any]]:
        """The armed rules with `seen` and `struck`."""
        armed: list[dict[str, Any]] = self.request_control("GET", "/faults")["armed"]
        return armed

    def control(self, **settings: Any) -> dict[str, Any]:
        """Change settings (none: just read them); all settings as they are then."""
        answer: dict[str, Any] = (
            self.request_control("PATCH", "", settings)
            if settings
            else self.request_control("GET", "")
        )
        return answer

    def calls(self, **filters: str) -> list[dict[str, Any]]:
        """The requests to provider routes, oldest first; filters `reference`, `key`."""
        calls: list[dict[str, Any]] = self.request_control("GET", _with_query("/calls", filters))[
            "calls"
        ]
        return calls

    def connections(self) -> list[dict[str, Any]]:
        """The connections, oldest first, without those that were used for `/_control`."""
        listed: list[dict[str, Any]] = self.request_control("GET", "/connections")["connections"]
        return [line for line in listed if "/_control" not in (line["first_line"] or "")]

    def forget_keys(self) -> int:
        """Forget all stored answers now; how many there were."""
        return int(self.request_control("POST", "/forget_keys")["forgotten"])

    def reset(self) -> None:
        """Everything as on the first start."""
        self.request_control("POST", "/reset")

    def wait_until(self, holds: Callable[[], object], timeout_seconds: float = 30.0) -> None:
        """Ask again and again until `holds()` is true. Raises `TimeoutError`."""
        ends = time.monotonic() + timeout_seconds
        while not holds():
            if time.monotonic() > ends:
                raise TimeoutError("the simulator did not get there")
            time.sleep(0.01)

    def wait_for_calls(self, count: int = 1, **filters: str) -> None:
        """Return once so many calls have arrived, finished or not."""
        self.wait_until(lambda: len(self.calls(**filters)) >= count)

    def start(self) -> None:
        """Run on `port` (0: a free one, kept from then on); return once it accepts connections."""
        raise NotImplementedError

    def stop(self) -> None:
        """Stop cleanly, if it runs."""
        raise NotImplementedError

    def restart(self) -> None:
        """Stop if it runs, then run again on the same data and port. Armed faults are gone."""
        self.stop()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class SimulatorProcess(_Simulator):
    """The simulator as a process; `data` None means a file that is removed at the end."""

    def __init__(self, data: Path | None = None, port: int = 0) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if data is None:
            self._folder = tempfile.TemporaryDirectory(prefix="simulator-")
            data = Path(self._folder.name) / "ledger.sqlite3"
        super().__init__(data, port)
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """The process's id, while it runs."""
        if self._process is None:
            raise RuntimeError("the simulator does not run")
        return self._process.pid

    def start(self) -> None:
        """See the base class. Raises `RuntimeError` if it ends or says nothing."""
        options = ["--host", _HOST, "--port", str(self.port), "--data", str(self.data)]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "app.providers.simulator", *options],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        out = self._process.stdout
        assert out is not None
        readable, _, _ = select.select([out], [], [], _START_SECONDS)
        line = out.readline() if readable else ""
        if not line.startswith("simulator listening on "):
            self.kill()
            raise RuntimeError(f"the simulator did not start: {line!r}")
        self.port = int(line.rsplit(":", 1)[1])

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait for the end."""
        self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with process:  # closes the pipe and waits
            process.send_signal(number)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._folder is not None:
            self._folder.cleanup()


class SimulatorThread(_Simulator):
    """The simulator in a thread with an event loop of its own; `data` None means in memory."""

    def __init__(self, data: Path | None = None, port: int = 0) -> None:
        super().__init__(data, port)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._halt: asyncio.Event | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None

    def start(self) -> None:
        """See the base class. Raises what `serve` raised."""
        self._ready.clear()
        self._failure = None
        self._thread = threading.Thread(target=self._run, name="simulator", daemon=True)
        self._thread.start()
        if not self._ready.wait(_START_SECONDS):
            raise RuntimeError("the simulator did not start")
        if self._failure is not None:
            self._thread.join()
            self._thread = None
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            self._ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._halt = asyncio.Event()
        await serve(_HOST, self.port, self.data, ready=self._announced, stop=self._halt)

    def _announced(self, host: str, port: int) -> None:
        self.port = port
        self._ready.set()

    def kill(self) -> None:
        """A thread cannot be killed: the same as `stop`."""
        self.stop()

    def stop(self) -> None:
        """Stop cleanly and join the thread; calls under way get a second."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None or self._halt is None:
            return
        self._loop.call_soon_threadsafe(self._halt.set)
        thread.join(timeout=10)
        if thread.is_alive():
            raise RuntimeError("the simulator did not stop")


def _with_query(path: str, filters: dict[str, str]) -> str:
    return f"{path}?{urlencode(filters)}" if filters else path
