"""How gradients and new values travel: the codec of each way, as a user says it in a word."""

from __future__ import annotations

from dataclasses import dataclass

from psstore.codec.codecs import parse
from psstore.errors import BadArgument

MIN_ELEMS = 1024
"""Parameters with fewer elements travel as they are: biases and norms, mostly. They are sensitive, and few: in
ResNet-50 0.1 % of the bytes."""


@dataclass(frozen=True)
class Compression:
    """How gradients and new values travel.

    push: codec of gradients: 'none', 'bf16', 'fp16', 'int8', 'sign', 'topk' or 'topk:RATIO'. What it loses is added to
        the next gradient (error feedback).
    pull: codec of new values: 'none', 'bf16', 'fp16', 'int8' or 'sign'. Every worker must have the same.
    min_elems: parameters with fewer elements travel as they are.

    Raises BadArgument for another name.
    """

    push: str = "none"
    pull: str = "none"
    min_elems: int = MIN_ELEMS

    def __post_init__(self) -> None:
        if not isinstance(self.push, str) or not isinstance(self.pull, str):
            raise BadArgument(f"push is {self.push!r}, and pull {self.pull!r}; expected names of codecs, as 'int8'")
        if not isinstance(self.min_elems, int) or isinstance(self.min_elems, bool) or self.min_elems < 0:
            raise BadArgument(f"min_elems is {self.min_elems!r}; expected a number of elements, from 0 on")
        parse(self.push)
        pull = parse(self.pull)
        if pull is not None and not pull.pulls:
            raise BadArgument(f"codec {self.pull!r} is for gradients: pull in bf16, fp16, int8, sign or none")

    @staticmethod
    def of(chosen: Compression | str | None) -> Compression:
        """'int8' is for both ways, 'topk:0.01' for pushes, of which alone it is; 'push=sign,pull=bf16' says each. None:
        neither. Raises BadArgument for what means nothing."""
        if chosen is None:
            return Compression()
        if isinstance(chosen, Compression):
            return chosen
        if not isinstance(chosen, str):
            raise BadArgument(f"compression is a {type(chosen).__qualname__}: {_EXPECTED}")
        if "=" not in chosen:
            codec = parse(chosen)
            return Compression(chosen, chosen if codec is not None and codec.pulls else "none")
        ways = dict(part.split("=", 1) for part in chosen.split(",") if "=" in part)
        if len(ways) != chosen.count(",") + 1 or not ways.keys() <= {"push", "pull"}:
            raise BadArgument(f"compression {chosen!r}: {_EXPECTED}")
        return Compression(ways.get("push", "none"), ways.get("pull", "none"))


_EXPECTED = "expected a codec's name, 'push=sign,pull=int8', or a psstore.torch.Compression"
