"""The playground as a Ray Serve application of its own, mounted at `/playground` beside the API."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException

from tidar_core.config import ConfigError
from tidar_core.settings import read_options

PLAYGROUND = "Playground"


class PlaygroundOptions(BaseModel):
    """What the builder takes. `max_ongoing_requests`: how many files are sent at once. A page takes some as it loads;
    then it holds no request open, so that far more tabs may be open."""

    model_config = ConfigDict(extra="forbid")

    max_ongoing_requests: int = Field(default=500, ge=1)


@serve.ingress()
class Playground:
    """Serves the page and its files. The page's script talks to `/v1` itself, so no model text comes by here."""

    def __serve_build_asgi_app__(self) -> object:
        """The ASGI application, built in the replica: one with Gradio blocks in it cannot be pickled."""
        from playground.page import application

        return application()


def build(args: dict[str, Any]) -> Application:
    """The application to run with `route_prefix="/playground"`: Serve hands the prefix on as the root path.

    `args` are the fields of `PlaygroundOptions`; a mistake leaves as Serve's own exception, which it shows as one line.

    One replica, since Gradio keeps its queue in memory, and no CPU reserved: it waits for browsers. Asked to go, it
    does not wait for them: an open tab has all of the page, and asks the API for the rest.
    """
    try:
        options = read_options(PlaygroundOptions, args)
    except ConfigError as error:
        raise RayServeException(str(error)) from None
    deployment = serve.deployment(
        name=PLAYGROUND,
        num_replicas=1,
        max_ongoing_requests=options.max_ongoing_requests,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=1,
    )(Playground)
    return deployment.bind()
