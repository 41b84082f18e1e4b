"""A store on a Ray cluster: `psstore.ray.start`.

>>> with psstore.ray.start(shards=4, standbys=1, workers=8) as store:
...     TorchTrainer(train, train_loop_config={"store": store}, …).fit()

where each worker trains on `config["store"].connect()`. docs/ray.md has the whole picture.
"""

from __future__ import annotations

try:
    from psstore.launch.ray.store import RayStore, start
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ModuleNotFoundError("psstore.ray needs Ray: pip install 'psstore[ray]'", name="ray") from None

__all__ = ["RayStore", "start"]
