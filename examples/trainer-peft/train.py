"""Fine-tunes a small language model with LoRA, by Hugging Face's Trainer and PEFT.

It resumes from its last checkpoint.

The model is made here, with random weights, and nothing is downloaded: put
`AutoModelForCausalLM.from_pretrained(...)` and your dataset in their places. `train` starts one
process for each rank under torchrun; the Trainer finds them.
"""

import argparse
import os

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

VOCABULARY = 64
LENGTH = 32


class Sequences(Dataset):
    """Sequences in which each number follows from the one before."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        number = index % VOCABULARY
        numbers = []
        for _ in range(LENGTH):
            numbers.append(number)
            number = (3 * number + 1) % VOCABULARY
        sequence = torch.tensor(numbers)
        return {"input_ids": sequence, "labels": sequence}


def make_model():
    """Return a model of two layers.

    LoRA trains small matrices beside its attention, and its head.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    lora = LoraConfig(
        r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM"
    )
    return get_peft_model(LlamaForCausalLM(config), lora)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    parser.add_argument("--batch", type=int, default=16, help="sequences for each rank")
    options = parser.parse_args()

    set_seed(0)
    has_gpu = torch.cuda.is_available()
    arguments = TrainingArguments(
        output_dir=os.environ.get("TRAINWORKS_CHECKPOINT_DIRECTORY", "checkpoints"),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-2,
        save_steps=options.save_every,
        save_total_limit=3,
        logging_steps=10,
        # Without this each process on a host without a GPU trains alone.
        use_cpu=not has_gpu,
        ddp_backend="nccl" if has_gpu else "gloo",
        ddp_find_unused_parameters=False,
        dataloader_pin_memory=has_gpu,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model=make_model(), args=arguments, train_dataset=Sequences(4096))
    if trainer.is_world_process_zero():
        print(f"{arguments.world_size} processes", flush=True)
    newest = os.environ.get("TRAINWORKS_RESUME_FROM")
    if newest and trainer.is_world_process_zero():
        print(f"continues from {newest}", flush=True)
    trainer.train(resume_from_checkpoint=newest)
    trainer.save_model(os.environ.get("SM_MODEL_DIR", "model"))


if __name__ == "__main__":
    main()
