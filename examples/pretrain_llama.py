"""Pretrain a LLaMA: the same script on a laptop's CPU, on CUDA and on Gaudi.

    make demo                                                    # makes the data that this example reads by default
    python examples/pretrain_llama.py                            # two CPU processes, tensor parallel
    python examples/pretrain_llama.py --model llama3.1-8b --data data/corpus_text_document --seq-length 8192 \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model Llama-3.1-8B --devices 8 --tp 4 \\
        --micro-batch-size 1 --precision bf16-mixed --steps 100000
"""

import argparse

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_megatron import LlamaModule, MegatronDataModule, MegatronHPUStrategy, Throughput


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=".demo/corpus_text_document", help="path of the token files, without ending")
    parser.add_argument("--tokenizer-type", default="GPTSentencePieceTokenizer", help="tokenizer that made them")
    parser.add_argument("--tokenizer-model", help="file or folder of it; by default the one beside the token files")
    parser.add_argument("--model", default="llama-tiny", help="name of a preset")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4, help="samples a data-parallel replica reads for one step")
    parser.add_argument("--micro-batch-size", type=int, default=2, help="samples of one forward")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks; data parallel takes what remains")
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()

    L.seed_everything(1234)
    trainer = L.Trainer(
        devices=options.devices,
        strategy=MegatronHPUStrategy(tp=options.tp, micro_batch_size=options.micro_batch_size),
        precision=options.precision,
        max_steps=options.steps,
        val_check_interval=options.steps,
        limit_val_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        default_root_dir="out",
        callbacks=[ModelCheckpoint(monitor="val_loss"), Throughput()],
    )
    model = LlamaModule(options.model, lr=3e-4, warmup_steps=options.steps // 10, lr_schedule="cosine")
    tokenizer = {"tokenizer_type": options.tokenizer_type, "tokenizer_model": options.tokenizer_model}
    trainer.fit(model, MegatronDataModule(options.data, options.seq_length, options.batch_size, **tokenizer))


if __name__ == "__main__":
    main()
