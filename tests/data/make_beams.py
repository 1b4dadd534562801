"""Makes `beams.json` beside it: beam search by `transformers`. `python -m tests.data.make_beams`, with torch,
transformers, gguf and accelerate (the group `bench`)."""

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers

from jaxpaged.models.gguf import builtin_model_path
from tests.engine.beam_cases import BUILTIN_OPTIONS, BUILTIN_PROMPTS, CONFIG, NUM_NEW, OPTIONS, PROMPTS, make_weights

PAD = 0


def make_tiny_model() -> Any:
    """The model of `beam_cases`."""
    c = CONFIG
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_q_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position,
        rms_norm_eps=c.rms_norm_eps,
        tie_word_embeddings=False,
        attention_bias=False,
    )
    assert config.rope_parameters["rope_theta"] == c.rope_theta
    weights = make_weights()
    state = {"model.embed_tokens.weight": weights["embed"], "model.norm.weight": weights["final_norm"]}
    state["lm_head.weight"] = weights["lm_head"]
    q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
    for i in range(c.num_layers):
        layer = {name: stack[i] for name, stack in weights["layers"].items()}
        state |= {
            f"model.layers.{i}.{name}.weight": value
            for name, value in {
                "input_layernorm": layer["attn_norm"],
                "self_attn.q_proj": layer["qkv"][:q],
                "self_attn.k_proj": layer["qkv"][q : q + kv],
                "self_attn.v_proj": layer["qkv"][q + kv :],
                "self_attn.o_proj": layer["o"],
                "post_attention_layernorm": layer["mlp_norm"],
                "mlp.gate_proj": layer["gate_up"][: c.intermediate_size],
                "mlp.up_proj": layer["gate_up"][c.intermediate_size :],
                "mlp.down_proj": layer["down"],
            }.items()
        }
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in state.items()})
    return model


def search(model: Any, prompt: list[int], *, stop_token_ids: tuple[int, ...], **options: Any) -> list[Any]:
    """All beams of one prompt, best first: token ids and score of each."""
    config = transformers.GenerationConfig(
        do_sample=False,
        eos_token_id=list(stop_token_ids) or None,
        pad_token_id=PAD,
        num_return_sequences=options["num_beams"],
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    model.generation_config = config
    with torch.inference_mode():
        out = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long))
    beams = []
    for row, score in zip(out.sequences[:, len(prompt) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((i + 1 for i, t in enumerate(row) if t in stop_token_ids), len(row))
        beams.append([row[:end], score])
    return beams


def main() -> None:
    """Writes the file."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    tiny = make_tiny_model()
    found = [[search(tiny, p, max_new_tokens=NUM_NEW, **options) for p in PROMPTS] for options in OPTIONS]
    folder, file = os.path.split(builtin_model_path())
    builtin = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    prompts = [tokenizer.encode(text) for text in BUILTIN_PROMPTS]
    of_builtin = [search(builtin, p, **BUILTIN_OPTIONS) for p in prompts]
    record = {
        "script": "tests/data/make_beams.py",
        "transformers": transformers.__version__,
        "tiny": found,
        "builtin_prompts": prompts,
        "builtin": of_builtin,
    }
    text = json.dumps(record, separators=(",", ":"))
    Path(__file__).with_name("beams.json").write_text(text + "\n", "utf-8")


if __name__ == "__main__":
    main()
