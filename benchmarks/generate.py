"""How fast does the engine generate text, against Hugging Face transformers? `python -m benchmarks.generate`

Both run the built-in model (SmolLM2-135M-Instruct from one GGUF file, dequantised) in float32 on the CPU, greedily,
from the same prompt ids, and never stop early, so that all rivals make the same tokens: they are compared before
anything is timed. Rivals of 16 prompts: `generate`, a static batch padded on the left, and `generate_batch`,
continuous batching over a paged cache, as it comes and with its pool sized by hand; all with sdpa attention. Rival of
one prompt: `generate`. What the engine's own options bring is measured against the engine without them: prefix caching
where many prompts begin alike, a swap space where conversations take turns in a pool for one, and n-gram speculation
where a text is copied. Loading and the first, compiling run of each are not timed.

What to expect: a decode step reads every weight once, 540 MB, whatever the batch. That alone bounds a single stream
(at 10 GB/s 54 ms a token). A step of 16 multiplies 4.3 GFLOP, a prompt 0.2 a token, at about the same rate on all
sides. What is left to win is padding, attention to other people's tokens, and the time between operations.
"""

import argparse
import functools
import logging
import os
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks import harness

os.environ["JAX_PLATFORMS"] = "cpu"  # read when JAX is first used

NUM_PROMPTS, NUM_NEW = 16, 64
SHORTEST, LONGEST = 8, 256
PAGE_SIZE = 16
OURS = "jaxpaged"
NUM_SHARING, SHARED, NUM_NEW_SHARING = 32, 512, 32
NUM_TALKS, NUM_TURNS, NUM_NEW_TURN = 3, 4, 16
TEXT = """
The lighthouse stood at the end of a long spit of sand, and the only road to it was covered twice a day by the sea.
Every keeper who had lived there left something behind: a shelf of books about birds, a telescope with a cracked lens,
a piano that nobody could explain. When Anna arrived in the autumn she found all of them in the room under the lamp,
together with a letter addressed to whoever came next. It began with the weather, as letters from the coast usually
do, and went on to describe the engine, the tides, the neighbours on the other side of the bay and the price of oil.
Only on the last page did the writer come to the point. There was, he said, a second light. It could be seen on clear
nights in March, low over the water, and it answered the signals of the lamp with signals of its own. He had written
them down for eleven years. He had never told anybody, because nobody had ever asked him a question to which it would
have been the answer. Anna read the page twice, put on her coat and climbed the stairs to look at the sea. It was flat
and empty, the colour of slate, and the only light on it was her own, passing over the same water every twelve
seconds. She wound the clock, wrote the hour in the log and sat down by the window to wait for the spring, which was
five months away, with a blanket and a pot of tea.
"""


def make_prompts(tokenizer) -> list[list[int]]:
    """Pieces of `TEXT`, each of its own length and place."""
    token_ids = tokenizer.encode(" ".join(TEXT.split()))
    rng = np.random.default_rng(0)
    lengths = rng.integers(SHORTEST, LONGEST + 1, NUM_PROMPTS)
    starts = [rng.integers(0, len(token_ids) - n) for n in lengths]
    return [token_ids[start : start + n] for start, n in zip(starts, lengths, strict=True)]


def make_sharing_prompts(tokenizer) -> list[list[int]]:
    """`SHARED` tokens that all have, and 8 to 24 of their own."""
    token_ids = 2 * tokenizer.encode(" ".join(TEXT.split()))
    rng = np.random.default_rng(1)
    lengths = rng.integers(8, 25, NUM_SHARING)
    starts = [rng.integers(0, len(token_ids) - n) for n in lengths]
    own = [token_ids[start : start + n] for start, n in zip(starts, lengths, strict=True)]
    return [token_ids[:SHARED] + rest for rest in own]


def make_turns(tokenizer) -> list[list[int]]:
    """Conversations that take turns: each time the one before and some tokens more. They begin apart."""
    token_ids = 3 * tokenizer.encode(" ".join(TEXT.split()))
    talks = [token_ids[100 * i :] for i in range(NUM_TALKS)]
    return [talk[: SHARED + 32 * turn] for turn in range(NUM_TURNS) for talk in talks]


def make_copying_prompt(tokenizer) -> list[int]:
    """A paragraph twice, and the first words of it once more: what follows is a copy."""
    paragraph = " ".join(TEXT.split()[:96]) + "\n\n"
    begin = " ".join(TEXT.split()[:6])
    return tokenizer.encode(2 * paragraph + begin)


class Jaxpaged:
    """Our engine, with a pool for all prompts.

    Args:
        loaded: What `load_model` returned.
        num_new: Tokens to generate from each prompt.
        num_pages: Of the pool; None is enough for all.
        options: Of the engine. Without prefix caching, or the second run of a prompt would find the first's pages.
    """

    def __init__(self, loaded, num_new: int = NUM_NEW, num_pages: int | None = None, **options):
        from jaxpaged.engine import Engine, SamplingParams, SchedulerConfig

        model, self.tokenizer = loaded
        num_tokens = max(NUM_PROMPTS * (LONGEST + NUM_NEW), NUM_SHARING * (SHARED + 24 + NUM_NEW_SHARING))
        num_pages = num_pages or num_tokens // PAGE_SIZE + 2 * NUM_SHARING
        cache = model.cache_config(num_pages=num_pages, page_size=PAGE_SIZE)
        config = SchedulerConfig(max_model_len=1024)
        self.engine = Engine(model, cache, config, **({"prefix_caching": False} | options))
        self.params = SamplingParams(max_new_tokens=num_new)

    def generate(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """New tokens of each prompt, with no page left from before."""
        self.engine.reset()
        return [list(output.token_ids) for output in self.engine.generate(prompts, self.params)]

    def generate_in_turn(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """The same, one prompt after another."""
        self.engine.reset()
        return [list(self.engine.generate([prompt], self.params)[0].token_ids) for prompt in prompts]


class Transformers:
    """The same weights in transformers."""

    def __init__(self, torch):
        import transformers
        from transformers import GenerationConfig

        from jaxpaged.models.gguf import builtin_model_path

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        logging.disable(logging.WARNING)
        folder, file = os.path.split(builtin_model_path())
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()
        self.config = GenerationConfig(do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=0)
        self.model.generation_config = self.config

    def generate(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """New tokens of each prompt, by a static batch padded on the left."""
        width = max(map(len, prompts))
        token_ids = self.torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = self.torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with self.torch.inference_mode():
            return self.model.generate(token_ids, attention_mask=mask)[:, width:].tolist()

    def generate_batch(self, prompts: Sequence[list[int]], *, by_hand: bool = False) -> list[list[int]]:
        """New tokens of each prompt, by continuous batching.

        Args:
            by_hand: Size the pool by what the prompts need, two of its pages of 256 tokens each, instead of by the
                memory of the machine.
        """
        from transformers import ContinuousBatchingConfig

        sizes = {"num_blocks": 2 * NUM_PROMPTS, "max_batch_tokens": NUM_PROMPTS * LONGEST} if by_hand else {}
        with self.torch.inference_mode():
            outputs = self.model.generate_batch(
                list(prompts),
                generation_config=self.config,
                continuous_batching_config=ContinuousBatchingConfig(**sizes),
            )
        by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
        return [by_prompt[tuple(p)] for p in prompts]


def check_equal(expected: list[list[int]], actual: list[list[int]], who: str) -> None:
    """Exits where a rival made other tokens: a comparison of unlike work says nothing."""
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        if a != b:
            at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            raise SystemExit(f"{who} disagrees on prompt {i} from new token {at} on ({len(a)} and {len(b)} tokens).")


def question(
    name: str, theirs: str, reach: float | None, timings: dict[str, harness.Timing], num_tokens: int
) -> harness.Question:
    return harness.Question(
        name=name,
        ours=OURS,
        theirs=theirs,
        reach=reach,
        timings={who: timings[who] for who in (OURS, theirs)},
        num_tokens=num_tokens,
    )


def against_transformers(loaded, runs: int) -> list[harness.Question]:
    """16 prompts together, and one alone."""
    torch = harness.import_torch("benchmarks.generate", "transformers", "gguf", "accelerate")
    ours, theirs = Jaxpaged(loaded), Transformers(torch)
    prompts = make_prompts(ours.tokenizer)
    expected = ours.generate(prompts)
    check_equal(expected, theirs.generate(prompts), "generate")
    check_equal(expected, theirs.generate_batch(prompts), "generate_batch")
    check_equal(expected, theirs.generate_batch(prompts, by_hand=True), "generate_batch by hand")
    check_equal(ours.generate(prompts[:1]), theirs.generate(prompts[:1]), "generate of one prompt")

    static, continuous, by_hand = "generate", "generate_batch", "generate_batch, pool sized by hand"
    batch = harness.compare(
        {
            OURS: functools.partial(ours.generate, prompts),
            static: functools.partial(theirs.generate, prompts),
            continuous: functools.partial(theirs.generate_batch, prompts),
            by_hand: functools.partial(theirs.generate_batch, prompts, by_hand=True),
        },
        warmups=0,
        runs=runs,
    )
    single = harness.compare(
        {OURS: lambda: ours.generate(prompts[:1]), static: lambda: theirs.generate(prompts[:1])},
        warmups=0,
        runs=runs,
    )
    lengths = sorted(map(len, prompts))
    work = f"{NUM_PROMPTS} prompts of {lengths[0]} to {lengths[-1]} tokens, {NUM_NEW} new tokens each"
    num_tokens = NUM_PROMPTS * NUM_NEW
    return [
        question(f"{work}: static batch", static, 1.2, batch, num_tokens),
        question(f"{work}: continuous batching", continuous, 4, batch, num_tokens),
        question(f"{work}: the same, tuned", by_hand, None, batch, num_tokens),
        question(f"one prompt of {len(prompts[0])} tokens, {NUM_NEW} new tokens", static, 1.2, single, NUM_NEW),
    ]


def against_itself(loaded, runs: int) -> list[harness.Question]:
    """What prefix caching, a swap space and speculation bring, where they should."""
    from jaxpaged.engine import NgramSpeculation
    from jaxpaged.paging import SwapSpace

    def compare(engines: dict[str, Callable], prompts: list[list[int]]) -> dict[str, harness.Timing]:
        expected, actual = (generate(prompts) for generate in engines.values())
        check_equal(expected, actual, list(engines)[1])
        rivals = {name: functools.partial(generate, prompts) for name, generate in engines.items()}
        return harness.compare(rivals, warmups=0, runs=runs)

    make = functools.partial(Jaxpaged, loaded)
    sharing, copying, turns = (f(loaded[1]) for f in (make_sharing_prompts, make_copying_prompt, make_turns))
    uncached, undrafted, unswapped = "without prefix caching", "without speculation", "without swap space"
    with_cache, plain = make(NUM_NEW_SHARING, prefix_caching=True), make(NUM_NEW_SHARING)
    shared = compare({OURS: with_cache.generate, uncached: plain.generate}, sharing)
    drafting, plain = make(speculation=NgramSpeculation()), make()
    copied = compare({OURS: drafting.generate, undrafted: plain.generate}, [copying])
    for_one = {"num_new": NUM_NEW_TURN, "num_pages": 2 * SHARED // PAGE_SIZE, "prefix_caching": True}
    swapping, plain = make(**for_one, swap=SwapSpace(NUM_TALKS * 2 * SHARED // PAGE_SIZE)), make(**for_one)
    in_turn = compare({OURS: swapping.generate_in_turn, unswapped: plain.generate_in_turn}, turns)
    work = f"{NUM_SHARING} prompts that share {SHARED} tokens, {NUM_NEW_SHARING} new tokens each"
    return [
        question(f"{work}: prefix caching", uncached, 3, shared, NUM_SHARING * NUM_NEW_SHARING),
        question(
            f"{NUM_TALKS} conversations of {len(turns[0])} to {len(turns[-1])} tokens take {NUM_TURNS} turns each in a "
            f"pool for one, {NUM_NEW_TURN} new tokens a turn: evicted prefixes kept",
            unswapped,
            None,
            in_turn,
            len(turns) * NUM_NEW_TURN,
        ),
        question(
            f"a text copied, {len(copying)} tokens, {NUM_NEW} new ones: n-gram drafts", undrafted, 1.5, copied, NUM_NEW
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description="Tokens a second, by rivals.")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each rival, in turn (default 3)")
    runs = parser.parse_args().runs
    from jaxpaged.models.loading import load_model

    loaded = load_model()
    harness.report("generate", against_transformers(loaded, runs) + against_itself(loaded, runs))


if __name__ == "__main__":
    main()
