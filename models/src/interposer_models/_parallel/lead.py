"""The order that the engines of all ranks follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from interposer import Ranks
from interposer.errors import RankError, described
from interposer.tooling import gather_bytes
from interposer_models._parallel.codec import decode, encode
from interposer_ops.communicators import TorchCommunicator

T = TypeVar("T")
_EVERY = 64  # steps, since a comparison takes as long as a tenth of a short one


class Lead(Protocol):
    """The side of one rank.

    Attributes:
        is_one_program: calls come from the program of this rank, whose process groups it knows.
    """

    is_one_program: bool

    @property
    def trouble(self) -> str:
        """The reason why no step can be computed; empty where none is known."""
        ...

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        """Have a method called on the other ranks as well, before it is here."""
        ...

    def everywhere(
        self, name: str, arguments: tuple[Any, ...], call: Callable[[], T], **options: Any
    ) -> list[Any]:
        """Return what a method returns on every rank, which is ``call`` on this one.

        Raises: RankError: some ranks raised an error and others did not.
        """
        ...

    def begin(self, digest: int, *, fresh: bool, speculates: bool) -> None:
        """Let the ranks begin a step.

        Args:
            digest: of all that was computed and asked for.
            fresh: it holds requests that no step has seen.
            speculates: guesses are verified in the step.
        """
        ...

    def decide(self, flag: bool) -> bool:
        """Return what rank 0 says, where time or chance decides."""
        ...

    def reason(self, error: RankError) -> RankError:
        """Return why ranks were lost, where more is known than a collective could tell."""
        ...

    def close(self) -> None:
        """Give back what belongs to the lead alone."""
        ...


class Silent:
    """Coordination of a single rank: every method acts on this rank alone."""

    is_one_program = True
    trouble = ""

    def tell(self, name: str, *arguments: Any, **options: Any) -> None:
        """Send no command."""

    def everywhere(
        self, name: str, arguments: tuple[Any, ...], call: Callable[[], T], **options: Any
    ) -> list[Any]:
        """Call the function, and return a list with its result on this rank."""
        return [call()]

    def begin(self, digest: int, *, fresh: bool, speculates: bool) -> None:
        """Do nothing at the start of a step."""

    def decide(self, flag: bool) -> bool:
        """Return the flag."""
        return flag

    def reason(self, error: RankError) -> RankError:
        """Return the error."""
        return error

    def close(self) -> None:
        """Close nothing."""


class Everyone(Silent):
    """Coordination of ranks that all run the same program, without commands.

    The ranks compare their states at the first step of new requests, and at every 64th step.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._communicator = TorchCommunicator(ranks, "cpu")
        self._steps = 0

    def everywhere(
        self, name: str, arguments: tuple[Any, ...], call: Callable[[], T], **options: Any
    ) -> list[Any]:
        """Call the function on every rank, and return the results in the order of the ranks."""
        own: Any = None
        failure: Exception | None = None
        try:
            own = call()
        except Exception as error:  # noqa: BLE001 - raised below, once others know of it
            failure = error
        text = "" if failure is None else described(failure)
        messages = gather_bytes(encode((text, own)), self._ranks.group, self._ranks.secret)
        found = [decode(message) for message in messages]
        check_outcomes(self._ranks.rank, name, [told for told, _ in found])
        if failure is not None:
            raise failure
        return [value for _, value in found]

    def begin(self, digest: int, *, fresh: bool, speculates: bool) -> None:
        """Compare the digests of all ranks, where it is time to."""
        self._steps += 1
        if not fresh and self._steps % _EVERY:
            return
        own = torch.tensor([[self._steps, digest, speculates]], dtype=torch.int64)
        found = self._communicator.all_gather(own, [1] * self._ranks.size).tolist()
        for rank, each in enumerate(found):
            if each != found[0]:
                raise drifted(self._ranks.rank, rank, self._steps)

    def decide(self, flag: bool) -> bool:
        """Return the flag of rank 0."""
        own = torch.tensor([flag], dtype=torch.uint8)
        return bool(self._communicator.broadcast(own, 0).item())

    def close(self) -> None:
        """Give back the communicator."""
        self._communicator.close()


def drifted(rank: int, other: int, step: int, known: str = "") -> RankError:
    """Return what to say where a rank computed something else than rank 0 until a step."""
    cause = f" Before, there: {known}." if known else ""
    return RankError(
        rank,
        f"rank {other} had other requests or computed other tokens than rank 0 before step {step}."
        f"{cause} Try: the same calls in the same order on every rank, and kernels that promise "
        "'deterministic': Config(require='deterministic')",
        [other],
    )


def check_outcomes(rank: int, name: str, texts: list[str]) -> None:
    """Raise RankError where a call failed on some ranks only.

    Args:
        texts: of the error of each rank; empty where there was none.
    """
    failed = [other for other, text in enumerate(texts) if text]
    if failed and len(failed) < len(texts):
        raise RankError(
            rank,
            f"{name} failed on rank {failed[0]} and not on every rank, so that they are no longer "
            f"alike: {texts[failed[0]]}",
            failed,
        )
