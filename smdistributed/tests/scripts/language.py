"""Train a small GPT-2 with smp, as a pre-training script does: fp16, clipped master gradients,
checkpoints, resume.
"""

import argparse
import os

import numpy as np
import torch
import transformers
from torch import nn, optim
from transformers import AutoModelForCausalLM, GPT2Config, set_seed

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as smp
from smdistributed.modelparallel.torch.nn import FusedLayerNorm as LayerNorm
from smdistributed.modelparallel.torch.nn.huggingface.gpt2 import (
    translate_hf_state_dict_to_smdistributed,
    translate_state_dict_to_hf_gpt2,
)

TOKENS, LENGTH, BATCH = 64, 16, 8


class Counting(torch.utils.data.Dataset):
    """Lines that count up from anywhere."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(LENGTH) + 7 * index) % TOKENS
        return ids, torch.ones_like(ids)


class Nothing(torch.utils.data.Dataset):
    """The data of ranks that do not have the first partition."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.Tensor(0), torch.Tensor(0)


@smp.step
def train_step(model, optimizer, input_ids, attention_mask, args):
    loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]
    model.backward(loss)
    return loss


@smp.step
def test_step(model, input_ids, attention_mask):
    return model(input_ids=input_ids, attention_mask=attention_mask, labels=input_ids)["loss"]


def dataloader(seed):
    if smp.pp_rank() == 0:
        data = Counting()
        sampler = torch.utils.data.DistributedSampler(
            data,
            shuffle=True,
            seed=seed,
            rank=smp.dp_rank(),
            num_replicas=smp.dp_size(),
            drop_last=True,
        )
        loader = torch.utils.data.DataLoader(
            data, sampler=sampler, batch_size=BATCH, pin_memory=True, drop_last=True
        )
        smp.broadcast(len(loader), smp.PP_GROUP)
        return loader
    length = smp.recv_from(0, smp.RankType.PP_RANK)
    return torch.utils.data.DataLoader(Nothing(length * BATCH), batch_size=BATCH, drop_last=True)


def groups(module):
    decay, plain = {"params": []}, {"params": [], "weight_decay": 0.0}
    seen = set()
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                group = plain if name == "bias" or isinstance(child, LayerNorm) else decay
                group["params"].append(parameter)
                seen.add(id(parameter))
    return decay, plain


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        loss = sum(test_step(model, *batch).reduce_mean() for batch in loader)
    torch.distributed.all_reduce(loss, group=smp.get_dp_process_group())
    model.train()
    return (loss / smp.dp_size() / len(loader)).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default=os.environ["SM_MODEL_DIR"])
    parser.add_argument("--n_gpus", default=os.environ["SM_NUM_GPUS"])
    parser.add_argument("--max_steps", type=int, default=20)
    parser.add_argument("--fp16", type=int, default=0)
    parser.add_argument("--pipeline_parallel_degree", type=int, default=1)
    parser.add_argument("--tensor_parallel_degree", type=int, default=1)
    parser.add_argument("--sharded_data_parallel_degree", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--resume", choices=["", "partial", "full"], default="")
    parser.add_argument("--mp_parameters", default="")
    args, _ = parser.parse_known_args()
    config = {
        "ddp": True,
        "pipeline_parallel_degree": args.pipeline_parallel_degree,
        "tensor_parallel_degree": args.tensor_parallel_degree,
        "sharded_data_parallel_degree": args.sharded_data_parallel_degree,
        "sdp_gradient_clipping": 1.0,
        "microbatches": args.microbatches,
        "fp16": args.fp16 > 0,
        "checkpoint_attentions": False,
        "static_mode": False,
        "fast_mode": False,
    }
    smp.init(config)
    if smp.rank() == 0:
        print(
            "transformers", transformers.__version__, "smp", smdistributed.modelparallel.__version__
        )
    set_seed(1)
    settings = GPT2Config(
        vocab_size=TOKENS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=4,
        n_head=2,
        use_cache=False,
        return_dict=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    with smp.model_creation(
        tensor_parallelism=smp.tp_size() > 1,
        attention_in_fp32=False,
        query_key_layer_scaling=True,
        fused_softmax=True,
        fused_bias_gelu=True,
        dtype=torch.float16 if args.fp16 else torch.get_default_dtype(),
    ):
        model = AutoModelForCausalLM.from_config(settings)
    count = sum(np.prod(p.size()) for p in model.parameters())
    torch.cuda.set_device(smp.local_rank())
    model = smp.DistributedModel(model, trace_device="gpu")
    layers = model.get_module().transformer.h
    assert layers is model.module.module.module.transformer.h
    optimizer = optim.AdamW(
        groups(model.get_module()), lr=0.01, betas=(0.9, 0.95), weight_decay=0.01
    )
    options = {"strategy": "each"} if isinstance(layers, nn.Sequential) else {}
    smp.set_activation_checkpointing(layers, **options)
    optimizer = smp.DistributedOptimizer(
        optimizer,
        static_loss_scale=None,
        dynamic_loss_scale=True,
        dynamic_loss_args={
            "init_scale": 2**14,
            "scale_window": 1000,
            "min_scale": 1,
            "delayed_shift": 2,
        },
    )
    steps = 0
    if args.resume == "partial":
        steps = smp.resume_from_checkpoint(args.folder, partial=True)["steps"]
    elif args.resume == "full":
        saved = smp.load(os.path.join(args.folder, f"model-{count}.pt"), partial=False)
        model.load_state_dict(translate_hf_state_dict_to_smdistributed(saved["model"], LENGTH))
        if args.fp16:
            model.register_post_step_hook(optimizer.reload_model_params)
        steps = saved["steps"]
    skipped, last = 0, steps + args.max_steps
    model.train()
    loader = dataloader(1)
    while steps < last:
        for input_ids, attention_mask in loader:
            optimizer.zero_grad(set_to_none=True)
            loss = train_step(model, optimizer, input_ids, attention_mask, args).reduce_mean()
            if args.fp16:
                optimizer.clip_master_grads(1.0)
            optimizer.step()
            skipped += bool(args.fp16 and optimizer.overflow)
            steps += 1
            if smp.rank() == 0:
                print(f"Batch {steps} Loss: {loss.item()}")
            if steps >= last:
                break
    validation = evaluate(model, loader)
    if smp.rank() == 0:
        print(f"skipped {skipped}, validation {validation}")
    if smp.rdp_rank() == 0 or args.sharded_data_parallel_degree > 1:
        full_state = model.state_dict(gather_to_rank0=True)
        if smp.rank() == 0:
            state = {"model": translate_state_dict_to_hf_gpt2(full_state, LENGTH), "steps": steps}
            smp.save(state, os.path.join(args.folder, f"model-{count}.pt"), partial=False)
    smp.save_checkpoint(
        args.folder, tag=f"steps-{steps}", partial=True, model=model, optimizer=optimizer,
        user_content={"steps": steps}, num_kept_partial_checkpoints=1,
    )  # fmt: skip
    smp.barrier()
    if smp.rank() == 0:
        print("training finished")


if __name__ == "__main__":
    main()
