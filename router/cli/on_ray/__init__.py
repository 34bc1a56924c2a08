"""The commands for fleets on a Ray cluster: `up --on`, `status`, `scale`, `down`.

May import `config` and `options` of the command line, and the rooms below `cli`.
"""

from router.cli.on_ray.commands import down, scale, status
from router.cli.on_ray.start import ray_options, read_ray_flags, up_on_ray

__all__ = ["down", "ray_options", "read_ray_flags", "scale", "status", "up_on_ray"]
