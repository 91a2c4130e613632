"""Train a GPT-2 of 4 layers with Hugging Face's Trainer: smp or smddp, as the environment says."""

import argparse

import torch

try:  # smp reads the environment, and Transformers asks for it when it is imported
    import smdistributed.modelparallel.torch as smp
except ImportError:
    smp = None
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import is_sagemaker_dp_enabled, is_sagemaker_mp_enabled


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_steps", type=int, default=8)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    settings = GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=32,
        n_layer=4,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(settings)
    lines = [(torch.arange(16) + 7 * index) % 64 for index in range(64)]
    data = [{"input_ids": line, "labels": line} for line in lines]
    arguments = TrainingArguments(
        output_dir=args.output_dir,
        per_device_train_batch_size=8,
        max_steps=args.max_steps,
        logging_steps=1,
        save_steps=8,
        report_to=[],
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        learning_rate=0.005,
    )
    optimizer = None
    if is_sagemaker_mp_enabled():
        # Transformers 5 leaves this to the script.
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.005))
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data[:16],
        optimizers=(optimizer, None),
    )
    checkpoint = True if args.resume else None
    trainer.train(resume_from_checkpoint=checkpoint)
    evaluated = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        if is_sagemaker_mp_enabled():
            library = "smp"
        else:
            library = "smddp" if is_sagemaker_dp_enabled() else "plain"
        print(library)
        print(
            arguments.parallel_mode,
            type(trainer.model_wrapped).__name__,
            "world",
            arguments.world_size,
        )
        for entry in trainer.state.log_history:
            if "loss" in entry:
                print(f"Loss: {float(entry['loss']):.6f}")
        print(f"evaluated {evaluated:.6f}")
        print("training finished")


if __name__ == "__main__":
    main()
