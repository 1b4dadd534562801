"""How fast does the engine generate text, against Hugging Face transformers? `python -m benchmarks.generate`

Both run the built-in model (SmolLM2-135M-Instruct from one GGUF file, dequantised) in float32 on the CPU, greedily,
from the same prompt ids, and never stop early, so that all rivals make the same tokens: they are compared before
anything is timed. Rivals of 16 prompts: `generate`, a static batch padded on the left, and `generate_batch`,
continuous batching over a paged cache, as it comes and with its pool sized by hand; all with sdpa attention. Rival of
one prompt: `generate`. Loading and the first, compiling run of each are not timed.

What to expect: a decode step reads every weight once, 540 MB, whatever the batch. That alone bounds a single stream
(at 10 GB/s 54 ms a token). A step of 16 multiplies 4.3 GFLOP, a prompt 0.2 a token, at about the same rate on all
sides. What is left to win is padding, attention to other people's tokens, and the time between operations.
"""

import argparse
import functools
import logging
import os
from collections.abc import Sequence

import numpy as np

from benchmarks import harness

os.environ["JAX_PLATFORMS"] = "cpu"  # read when JAX is first used

NUM_PROMPTS, NUM_NEW = 16, 64
SHORTEST, LONGEST = 8, 256
PAGE_SIZE = 16
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


class Jaxpaged:
    """Our engine, with a pool for all prompts."""

    def __init__(self):
        from jaxpaged.engine import Engine, SamplingParams, SchedulerConfig
        from jaxpaged.models.loading import load_model

        model, self.tokenizer = load_model()
        num_pages = NUM_PROMPTS * -(-(LONGEST + NUM_NEW) // PAGE_SIZE) + 1
        config = SchedulerConfig(max_model_len=1024)
        cache = model.cache_config(num_pages=num_pages, page_size=PAGE_SIZE)
        self.engine = Engine(model, cache, config, prefix_caching=False)  # or the second run would find the first's
        self.params = SamplingParams(max_new_tokens=NUM_NEW)

    def generate(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """New tokens of each prompt."""
        return [list(output.token_ids) for output in self.engine.generate(prompts, self.params)]


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generate", description="Tokens a second, by rivals.")
    parser.add_argument("--runs", type=int, default=3, help="timed runs of each rival, in turn (default 3)")
    runs = parser.parse_args().runs
    torch = harness.import_torch("benchmarks.generate", "transformers", "gguf", "accelerate")
    ours, theirs = Jaxpaged(), Transformers(torch)
    prompts = make_prompts(ours.tokenizer)
    expected = ours.generate(prompts)
    check_equal(expected, theirs.generate(prompts), "generate")
    check_equal(expected, theirs.generate_batch(prompts), "generate_batch")
    check_equal(expected, theirs.generate_batch(prompts, by_hand=True), "generate_batch by hand")
    check_equal(ours.generate(prompts[:1]), theirs.generate(prompts[:1]), "generate of one prompt")

    static, continuous, by_hand = "generate", "generate_batch", "generate_batch, pool sized by hand"
    batch = harness.compare(
        {
            "jaxpaged": functools.partial(ours.generate, prompts),
            static: functools.partial(theirs.generate, prompts),
            continuous: functools.partial(theirs.generate_batch, prompts),
            by_hand: functools.partial(theirs.generate_batch, prompts, by_hand=True),
        },
        warmups=0,
        runs=runs,
    )
    single = harness.compare(
        {"jaxpaged": lambda: ours.generate(prompts[:1]), static: lambda: theirs.generate(prompts[:1])},
        warmups=0,
        runs=runs,
    )

    def question(name: str, theirs: str, reach: float | None, timings: dict[str, harness.Timing], num_prompts: int):
        return harness.Question(
            name=name,
            ours="jaxpaged",
            theirs=theirs,
            reach=reach,
            timings={who: timings[who] for who in ("jaxpaged", theirs)},
            num_tokens=num_prompts * NUM_NEW,
        )

    lengths = sorted(map(len, prompts))
    work = f"{NUM_PROMPTS} prompts of {lengths[0]} to {lengths[-1]} tokens, {NUM_NEW} new tokens each"
    questions = [
        question(f"{work}: static batch", static, 1.1, batch, NUM_PROMPTS),
        question(f"{work}: continuous batching", continuous, 3, batch, NUM_PROMPTS),
        question(f"{work}: the same, tuned", by_hand, None, batch, NUM_PROMPTS),
        question(f"one prompt of {len(prompts[0])} tokens, {NUM_NEW} new tokens", static, 1.2, single, 1),
    ]
    harness.report("generate", questions)


if __name__ == "__main__":
    main()
