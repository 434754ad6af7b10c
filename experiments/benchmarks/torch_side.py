"""The PyTorch side of `training_step.py`: transformers' DeepSeek-V3 on CPU.

A process of its own, in whichever Python has torch and transformers: nothing of
ours is imported. DeepSeek-V3 is our architecture without an indexer, hence the
fastest of the classes that transformers has for it. The process reads sizes as
one line of JSON, answers each further line with one training step, and every
answer is one line of JSON.

Attention is `sdpa`, the update is the fused AdamW, and of transformers' ways to
run experts, with and without `torch.compile`, the fastest is taken.
"""

from collections.abc import Callable
import json
import os
import sys
import time
from typing import Any

# `batched_mm` copies the weights of its expert for every row.
LARGEST_COPY_BYTES = 4 * 2**30


def config_fields(sizes: dict[str, Any]) -> dict[str, Any]:
  """Returns `DeepseekV3Config`'s fields for sizes in our names."""
  return {
    'vocab_size': sizes['vocab_size'],
    'hidden_size': sizes['hidden_dim'],
    'num_hidden_layers': sizes['num_layers'],
    'first_k_dense_replace': sizes['num_dense_layers'],
    'intermediate_size': sizes['dense_dim'],
    'num_attention_heads': sizes['num_heads'],
    'num_key_value_heads': sizes['num_heads'],
    'q_lora_rank': sizes['query_latent_dim'],
    'kv_lora_rank': sizes['latent_dim'],
    'qk_nope_head_dim': sizes['plain_dim'],
    'qk_rope_head_dim': sizes['rope_dim'],
    'v_head_dim': sizes['value_dim'],
    'n_routed_experts': sizes['num_experts'],
    'num_experts_per_tok': sizes['experts_per_token'],
    'moe_intermediate_size': sizes['expert_dim'],
    'n_shared_experts': 1,
    'n_group': 1,
    'topk_group': 1,
    'max_position_embeddings': sizes['length'],
    'num_mtp_layers': 0,
    'use_cache': False,
    'attn_implementation': 'sdpa',
  }


def ways(sizes: dict[str, Any]) -> list[str]:
  """Returns the expert implementations that fit in memory."""
  names = ['eager', 'grouped_mm']
  rows = sizes['rows'] * sizes['length'] * sizes['experts_per_token']
  copy_bytes = 8 * rows * sizes['hidden_dim'] * sizes['expert_dim']
  if copy_bytes <= LARGEST_COPY_BYTES:
    names.append('batched_mm')
  return names


def make_step(torch: Any, model: Any, tokens: Any) -> Callable[[Any], float]:
  """Returns a training step of a forward function, which returns its loss."""
  optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=3e-4,
    betas=(0.9, 0.95),
    eps=1e-8,
    weight_decay=0.1,
    fused=True,
  )

  def step(forward: Any) -> float:
    loss = forward(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss)

  return step


def seconds_of(step: Callable[[Any], float], forward: Any) -> float:
  """Returns the seconds that one step takes."""
  begin = time.perf_counter()
  step(forward)
  return time.perf_counter() - begin


def fastest(
  torch: Any, model: Any, step: Callable[[Any], float], sizes: dict[str, Any]
) -> tuple[Any, str, dict[str, float]]:
  """Returns the fastest forward function, its name, and all seconds."""

  def forward_of(way: str) -> Any:
    name, _, compiled = way.partition('+')
    model.set_experts_implementation(name)
    torch.compiler.reset()
    return torch.compile(model, dynamic=False) if compiled else model

  tried: dict[str, float] = {}
  names = ways(sizes)
  if sizes['compile']:
    names += [f'{name}+compile' for name in names]
  for way in names:
    forward = forward_of(way)
    # The first step allocates, and compiles where asked to.
    step(forward)
    tried[way] = seconds_of(step, forward)
  best = min(tried, key=lambda way: tried[way])
  forward = forward_of(best)
  step(forward)
  return forward, best, tried


def main() -> None:
  """Serves training steps over standard input and output."""
  # Libraries print; answers keep the real standard output to themselves.
  answers = os.fdopen(os.dup(1), 'w')
  os.dup2(2, 1)
  sizes = json.loads(sys.stdin.readline())

  import torch
  import transformers

  torch.set_num_threads(sizes['threads'])
  torch.manual_seed(0)
  config = transformers.DeepseekV3Config(**config_fields(sizes))
  model = transformers.DeepseekV3ForCausalLM(config).train()
  shape = (sizes['rows'], sizes['length'])
  tokens = torch.randint(0, sizes['vocab_size'], shape)
  step = make_step(torch, model, tokens)
  forward, best, tried = fastest(torch, model, step, sizes)

  def answer(**fields: Any) -> None:
    print(json.dumps(fields), file=answers, flush=True)

  answer(
    parameters=sum(p.numel() for p in model.parameters()),
    experts=best,
    tried=tried,
    attention=model.config._attn_implementation,
    threads=torch.get_num_threads(),
    versions=f'torch {torch.__version__}, '
    f'transformers {transformers.__version__}',
  )
  for _ in sys.stdin:
    answer(seconds=seconds_of(step, forward))


if __name__ == '__main__':
  main()
