"""An endpoint that Prometheus scrapes: the numbers of the last step."""

import logging
import re
from collections.abc import Mapping

from relax_core.run.metrics import describe
from relax_core.run.trackers.tracker import TrackedRun

_log = logging.getLogger(__name__)


class PrometheusTracker:
    """`http://<run.prometheus_host>:<run.prometheus_port>/metrics`, while the run lasts.

    A metric `reward` is the gauge `relax_reward`, a time `train` the gauge `relax_time_train`, each with the
    label `run`; `relax_step` says of which step.

    Attributes:
        port: on which it listens; the one of the settings, or a free one for 0.
    """

    def __init__(self, run: TrackedRun) -> None:
        """Begins to listen.

        Raises:
            ValueError: the port cannot be had.
        """
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        host, port = run.settings.prometheus_host, run.settings.prometheus_port
        self._name = run.folder.name
        # One of this run's own: the library's shows every other user of it in the process.
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise ValueError(
                f"Prometheus' endpoint cannot listen on {host}:{port} (run.prometheus_host, "
                f"run.prometheus_port): {error.strerror or error}. Give a port that is free, or 0 for any"
            ) from error
        self.port = int(self._server.server_port)
        _log.info("metrics for Prometheus at http://%s:%d/metrics", host, self.port)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Takes the numbers of one step, by tag."""
        self._set("relax_step", "The last step.", step)
        for tag, value in numbers.items():
            group, _, name = tag.partition("/")
            if group == "time":
                self._set(f"relax_time_{name}", f"Time of the last step: {name}.", value)
            else:
                self._set(f"relax_{name}", describe(name).doc, value)

    def close(self) -> None:
        """Ends the endpoint. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, name: str, doc: str, value: float) -> None:
        from prometheus_client import Gauge

        name = re.sub(r"[^a-zA-Z0-9_]", "_", name)
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, doc, ["run"], registry=self._registry)
        self._gauges[name].labels(self._name).set(value)
