"""A mix of requests for `jaxpaged bench`: when each arrives, how long its prompt and its answer are, what it shares.

Everything follows from the seed, and each trait from its own stream of random numbers: with another rate the same
prompts come, with other lengths at the same times.
"""

import argparse
import dataclasses
import math
import re
from typing import Literal, NamedTuple

import numpy as np

from jaxpaged.cli.errors import UsageError, check_at_least


@dataclasses.dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens.

    Attributes:
        first, second: The length and nothing; the least and the most; or the median and the sigma of the logarithm.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str, flag: str) -> "Lengths":
        """Read N, fixed:N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA. Raises UsageError for anything else."""
        number = r"(\d+(?:\.\d+)?)"
        if match := re.fullmatch(r"(?:fixed:)?(\d+)", text):
            lengths = cls("fixed", int(match[1]))
        elif match := re.fullmatch(r"uniform:(\d+),(\d+)", text):
            lengths = cls("uniform", int(match[1]), int(match[2]))
        elif match := re.fullmatch(rf"lognormal:{number},{number}", text):
            lengths = cls("lognormal", float(match[1]), float(match[2]))
        else:
            raise UsageError(f"`{flag}` must be N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA; got {text!r}.")
        if lengths.first < 1:
            raise UsageError(f"`{flag}` must be lengths of at least 1 token; got {text!r}.")
        if lengths.kind == "uniform" and lengths.second < lengths.first:
            raise UsageError(f"`{flag}` must be uniform:LOW,HIGH with LOW <= HIGH; got {text!r}.")
        return lengths

    def draw(self, rng: np.random.Generator, count: int, limit: int) -> list[int]:
        """Draw `count` lengths from 1 to `limit`; longer ones are cut to `limit`."""
        if self.kind == "fixed":
            drawn = np.full(count, self.first)
        elif self.kind == "uniform":
            drawn = rng.integers(min(int(self.first), limit), min(int(self.second), limit), count, endpoint=True)
        else:
            drawn = np.round(self.first * np.exp(self.second * rng.standard_normal(count)))
        return np.clip(drawn, 1, limit).astype(int).tolist()


class Arrival(NamedTuple):
    """A request to come.

    Attributes:
        time_s: When it arrives, in seconds from the start.
        prompt_token_ids: The common prefix, if it has one, and the prompt's own tokens.
        prefix: Index of the common prefix that the prompt begins with, or None.
        seed: Seed of its sampling.
    """

    time_s: float
    prompt_token_ids: list[int]
    num_new_tokens: int
    prefix: int | None
    priority: int
    seed: int

    @property
    def num_tokens(self) -> int:
        """Prompt and answer."""
        return len(self.prompt_token_ids) + self.num_new_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Mix:
    """What the flags of `jaxpaged bench` say about requests."""

    num_requests: int
    rate: float
    prompt_len: Lengths
    output_len: Lengths
    shared: float
    shared_len: int
    num_prefixes: int
    num_priorities: int
    seed: int

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> "Mix":
        """Raise UsageError for a flag out of range, by name."""
        check_at_least(args, 1, "num_requests", "shared_len", "num_prefixes", "num_priorities")
        if args.rate is not None and not 1e-6 <= args.rate < math.inf:
            raise UsageError(
                f"`--rate` must be finite, and at least 1e-06 requests a second; got {args.rate}. "
                "Without it all come at once."
            )
        if not 0 <= args.shared <= 1:
            raise UsageError(f"`--shared` must be a share from 0 to 1; got {args.shared}.")
        if not 0 <= args.seed < 2**32:
            raise UsageError(f"`--seed` must fit 32 bits without a sign; got {args.seed}.")
        return cls(
            num_requests=args.num_requests,
            rate=math.inf if args.rate is None else args.rate,
            prompt_len=Lengths.parse(args.prompt_len, "--prompt-len"),
            output_len=Lengths.parse(args.output_len, "--output-len"),
            shared=args.shared,
            shared_len=args.shared_len,
            num_prefixes=args.num_prefixes,
            num_priorities=args.num_priorities,
            seed=args.seed,
        )

    def arrivals(self, vocab_size: int, context: int) -> list[Arrival]:
        """Return the requests in order of arrival, the first at 0. Lengths are cut so that each fits the context.

        Raises:
            UsageError: The shared prefix leaves no room in the context.
        """
        n, streams = self.num_requests, map(np.random.default_rng, np.random.SeedSequence(self.seed).spawn(6))
        gaps, prompts, outputs, sharing, priorities, tokens = streams
        if self.shared and self.shared_len > context - 2:
            raise UsageError(
                f"`--shared-len` must be at most {context - 2}, to leave room in the context of {context} tokens; got "
                f"{self.shared_len}."
            )
        times = np.concatenate([[0.0], np.cumsum(gaps.exponential(1 / self.rate, n - 1))])
        prefixes = tokens.integers(0, vocab_size, (self.num_prefixes, self.shared_len)) if self.shared else None
        is_shared = sharing.random(n) < self.shared
        which = sharing.integers(self.num_prefixes, size=n)
        room = context - 1 - (self.shared_len if self.shared else 0)
        own = self.prompt_len.draw(prompts, n, room)
        new = self.output_len.draw(outputs, n, context - 1)
        of_priority = priorities.integers(self.num_priorities, size=n)
        arrivals = []
        for i in range(n):
            prompt = tokens.integers(0, vocab_size, own[i]).tolist()
            if prefixes is not None and is_shared[i]:
                prompt = prefixes[which[i]].tolist() + prompt
            arrivals.append(
                Arrival(
                    time_s=float(times[i]),
                    prompt_token_ids=prompt,
                    num_new_tokens=min(new[i], context - len(prompt)),
                    prefix=int(which[i]) if is_shared[i] else None,
                    priority=int(of_priority[i]),
                    seed=(self.seed + i) % 2**32,
                )
            )
        return arrivals
