"""Writes tiny models with random weights, two dense, one that sees, and two mixtures of experts, and their tokenisers.

    python make_models.py FOLDER

Runs in the engines' venv. The tokeniser is a byte-level BPE trained on Python's own library, so that it
takes any text; the weights are large enough that greedy decoding does not repeat one token for ever.
The second dense model opens each turn with thoughts, and ends them often: `</think>` has larger weights.
In a step of the second mixture of experts nearly all is attention over the KV cache, 16 KiB a token; one layer
of four has experts, so that ranks wait for each other once a step.
"""

import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from safetensors.torch import load_file, save_file  # type: ignore[import-not-found]
from tokenizers import (  # type: ignore[import-not-found]
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    trainers,
)
from transformers import (  # type: ignore[import-not-found]
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 2048
CONTEXT = 4096
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_THINKING = ["<think>", "</think>"]
_IMAGE = "<image>"
_END_OF_THOUGHTS = 3.0
_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] or '' }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


def tokeniser(*, thinks: bool = False) -> Any:
    """Return a tokeniser; of a model that `thinks` it has tokens around thoughts."""
    around = [AddedToken(text, special=False, normalized=False) for text in _THINKING if thinks]
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(around),
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in files], trainer)
    # Not special, as of real models: vLLM's parsers look for their text.
    tokenizer.add_tokens(around)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_SPECIAL[0],
        pad_token=_SPECIAL[0],
        eos_token=_SPECIAL[2],
        model_max_length=CONTEXT,
    )
    fast.chat_template = _TEMPLATE.replace(
        "assistant\n", "assistant\n<think>\n" if thinks else "assistant\n"
    )
    return fast


def save(folder: Path, config: Any, kind: Any, tokenizer: Any) -> None:
    """Write one model."""
    torch.manual_seed(0)
    model = kind(config)
    end = tokenizer.convert_tokens_to_ids(_THINKING[1])
    if end is not None:
        with torch.no_grad():
            model.lm_head.weight[end] *= _END_OF_THOUGHTS
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_vision(folder: Path, common: dict[str, Any]) -> None:
    """Write a model that sees images of 56 by 56 points, each in 16 tokens."""
    tokenizer = tokeniser()
    tokenizer.add_tokens([_IMAGE], special_tokens=True)
    part = (
        f"{{% if part['type'] == 'text' %}}{{{{ part['text'] }}}}{{% else %}}{_IMAGE}{{% endif %}}"
    )
    tokenizer.chat_template = _TEMPLATE.replace(
        "{{ message['content'] or '' }}",
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        f"{{% for part in message['content'] %}}{part}{{% endfor %}}{{% endif %}}",
    )
    eyes = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        initializer_range=0.3,
    )
    config = LlavaConfig(
        text_config=LlamaConfig(**common | {"vocab_size": len(tokenizer)}),
        vision_config=eyes,
        image_token_index=tokenizer.convert_tokens_to_ids(_IMAGE),
        vision_feature_layer=-1,
        image_seq_length=16,
    )
    save(folder, config, LlavaForConditionalGeneration, tokenizer)
    # As published models name them, and vLLM asks for them; transformers 5 leaves `vision_model` out.
    weights = folder / "model.safetensors"
    named = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(weights).items()
    }
    save_file(named, weights, metadata={"format": "pt"})
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        ),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=tokenizer.chat_template,
    ).save_pretrained(folder)


def main() -> None:
    """Write all."""
    folder = Path(sys.argv[1])
    tokenizer = tokeniser()
    common = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 2,
    }
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
    }
    dense = Qwen3Config(**common)
    save(folder / "tiny-dense", dense, Qwen3ForCausalLM, tokenizer)
    save(folder / "tiny-thinking", dense, Qwen3ForCausalLM, tokeniser(thinks=True))
    save_vision(folder / "tiny-vision", common)
    save(folder / "tiny-moe", Qwen3MoeConfig(**common, **experts), Qwen3MoeForCausalLM, tokenizer)
    attention = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "decoder_sparse_step": 4,
    }
    config = Qwen3MoeConfig(**common | experts | attention)
    save(folder / "attention-moe", config, Qwen3MoeForCausalLM, tokenizer)


if __name__ == "__main__":
    main()
