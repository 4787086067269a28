"""How long a step takes, by GPU and model."""

from __future__ import annotations

from math import log2

import msgspec

# The duration of an engine step in milliseconds. The formulas were fitted to measurements on an H200.
#
# With n new tokens, c cached tokens before them, and a decode batch with the sum of its contexts:
#
#     prefill     = max(m, a + b·n) + d·n·(c + n/2) + h·c
#     decode step = max(e + f·batch, e2 + f2·batch) + g·context
#     mixed step  = max(m, a + b·(n + batch)) + Σ d·n·(c + n/2) + h·Σ c + g·context
#
# The fits cover the model's forward pass only. `overhead_ms` is what the engine adds to each step.


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coefficients in ms. The formulas above show what each one multiplies."""

    m: float
    a: float
    b: float
    d: float
    h: float
    e: float
    f: float
    e2: float
    f2: float
    g: float
    overhead_ms: float = 0.2
    """Sampling (0.04 to 0.18 ms measured on an H200 when greedy), and scheduling that does not overlap with the GPU."""
    reload_us_per_token: float = 0.0
    """Time to copy KV from host memory back to the GPU."""

    def slowed_by(self, factor: float) -> Timing:
        """Return a timing in which everything takes `factor` times as long."""
        return Timing(**{name: factor * value for name, value in msgspec.structs.asdict(self).items()})

    def attention_ms(self, new_tokens: int, cached_tokens: int) -> float:
        """The part of a prefill whose cost adds to the rest of the step."""
        return self.d * new_tokens * (cached_tokens + new_tokens / 2) + self.h * cached_tokens

    def decode_floor_ms(self, batch: int) -> float:
        """The forward pass of a decode step over an empty context."""
        return max(self.e + self.f * batch, self.e2 + self.f2 * batch)

    def mixed_ms(self, new_tokens: int, attention_ms: float, batch: int, context_tokens: int) -> float:
        """The forward pass of a step with prefill chunks and decodes. `attention_ms`: the sum over the chunks."""
        return max(self.m, self.a + self.b * (new_tokens + batch)) + attention_ms + self.g * context_tokens


# Timing and memory of a model on a GPU: `profile("l4-1.5b")`, `profile("2xh100-32b")`.
#
# Three profiles were measured on one H200 in bf16: h200-1.5b, h200-8b and h200-32b. Their coefficients are fits to
# these measurements (the formulas are above). The other profiles are scaled from them, each term by its cause:
#
# - Computation (b, d, f2): by the ratio of sustained fp16 TFLOPs, which is the data sheet × `Gpu.efficiency`.
# - Memory reads (h, f, g, and the part of m and e that reads the weights once at MEMORY_EFFICIENCY): by the ratio of
#   memory bandwidths.
# - Latency (a, and the rest of m and e): not scaled. Over the three measured models, a is 0.050 to 0.055 ms per layer,
#   the rest of m is 0.039 to 0.058 and that of e 0.027 to 0.035, although the largest model has 20 times the parameters
#   of the smallest. This is time to launch kernels, so a T4 does not take longer for it.
# - e2 follows from the batch size at which decoding turns from memory bound to compute bound.
# - 70 B: scaled from 32 B. Work on the weights grows with the parameters; attention, KV (both models have 64 heads and
#   8 KV heads of 128), latency and the cost per sequence (f) grow with the layers.
# - Several GPUs (tensor parallel): work is divided by n · PARALLEL_EFFICIENCY^log2(n), latency is not divided. With
#   this efficiency two H100s prefill 7,200 cold tokens of the 32 B at 15,900 tokens/s, as llm-d's published workload
#   shows for its pods. It assumes NVLink. GPUs on PCIe are slower.
#
# Accuracy: the model gives 12.8 ms per token for the 8 B on an A100 with 40 GB (1,555 GB/s); 13.3 ms were measured (75
# tokens/s with vLLM 0.23, johnmusgrave.com/p/vllm-throughput-latency-sweep-on). llm-d's pods show at least 15.8 to 16.1
# ms (guides/inference-scheduling); 2xh100-32b gives 15.2. The power limits of T4 and L4 slow them down by an amount
# that depends on the load: their efficiencies below are those of GEMMs without a pause.
#
# A name without a count means the smallest number of GPUs (1, 2, 4, 8, 16) that holds the weights and 32,768 tokens of
# KV cache. One H100 holds a 32 B model and only 29 k KV tokens, so `h100-32b` is `2xh100-32b`. `1xh100-32b` is one GPU.

MEMORY_UTILISATION = 0.9
"""vLLM's default gpu_memory_utilization."""

ACTIVATION_BYTES_PER_BATCHED_TOKEN = 479_200
"""Memory for activations and graphs, per token of the step budget. Calibrated so that two H100s hold the 307,328 KV
tokens of the 32 B that llm-d published."""

PARALLEL_EFFICIENCY = 0.8852
"""Efficiency of tensor parallelism for each doubling of the GPUs. Calibrated on 15,900 prefill tokens/s, see above."""

MEMORY_EFFICIENCY = 0.89
"""Measured on the H200: copies read and write 4,272 of its 4,800 GB/s."""

LINK_EFFICIENCY = 0.88
"""Measured on the H200: 55.4 GB/s of PCIe 5.0 x16's 63."""

MIN_KV_TOKENS = 32_768
"""An engine with less KV memory would not serve the model at all."""


class Gpu(msgspec.Struct, frozen=True):
    """A GPU, from its data sheet."""

    tflops: float
    """Dense fp16/bf16 tensor TFLOPs."""
    efficiency: float
    """The fraction of `tflops` that large GEMMs sustain, measured. The sources are below."""
    memory_gb_per_s: float
    memory_mib: int
    """Memory of the GPU as nvidia-smi reports it."""
    link_gb_per_s: float
    """PCIe, in one direction."""
    max_num_batched_tokens: int
    """vLLM's default for an API server on this card (arg_utils.py: 8192 from 70 GiB on, the A100 excepted)."""
    max_num_seqs: int


class Model(msgspec.Struct, frozen=True):
    """What a model costs in time and memory."""

    timing: Timing
    """On one H200."""
    weight_bytes: float
    kv_bytes_per_token: int


# "torch-perf" is github.com/zzc0721/torch-performance-test-data: square fp16/bf16 matmuls by one script on many GPUs.
GPUS = {
    # NVIDIA T4 data sheet: 65 TFLOPs fp16 (no bf16), 320 GB/s GDDR6, 16 GB, PCIe 3.0 x16. Efficiency: 24 TFLOPs in 100
    # cuBLAS GEMMs of 4096, because of the 70 W power limit (forums.developer.nvidia.com/t/264462, answered by NVIDIA).
    # In short runs it reaches 42.7 (torch-perf, Kaggle; Colab 41.9), which would be 0.65.
    "t4": Gpu(65, 0.37, 320, 15_360, 15.75, 2048, 256),
    # NVIDIA L4 data sheet: 242 TFLOPs with sparsity, so 121 dense; 300 GB/s GDDR6, 24 GB, PCIe 4.0 x16. Efficiency: 55
    # to 59 TFLOPs bf16 from 4096 on, 71 at best (torch-perf, issue 120).
    "l4": Gpu(121, 0.47, 300, 23_034, 31.5, 2048, 256),
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOPs, 2,039 GB/s HBM2e, PCIe 4.0 x16. Efficiency: 264.5 bf16 (torch-perf)
    "a100": Gpu(312, 0.85, 2039, 81_920, 31.5, 2048, 256),
    # NVIDIA H100 SXM data sheet: 1,979 TFLOPs with sparsity, so 989 dense; 3,350 GB/s HBM3, 80 GB, PCIe 5.0 x16.
    # Efficiency: 784, 789 and 798 bf16 in three reports (torch-perf; issues 39 and 79)
    "h100": Gpu(989, 0.80, 3350, 81_559, 63.0, 8192, 1024),
    # NVIDIA H200 SXM data sheet: as the H100, with 4,800 GB/s HBM3e and 141 GB. Efficiency: 784 to 804 measured, GEMMs
    # of 8192 (torch-perf: 790)
    "h200": Gpu(989, 0.80, 4800, 143_771, 63.0, 8192, 1024),
}

# Qwen3 32B
_H200_32B = Timing(
    m=19.061,
    a=3.3045,
    b=0.098611,
    d=3.3119e-06,
    h=2.5963e-04,
    e=17.599,
    f=0.016809,
    e2=10.369,
    f2=0.075894,
    g=5.6197e-05,
)

_PARAMETERS_70B_TO_32B = 70.55e9 / 32.76e9  # Llama 3.1 70B against Qwen3 32B
_LAYERS_70B_TO_32B = 80 / 64

MODELS = {
    # Qwen2.5 1.5B
    "1.5b": Model(
        Timing(
            m=1.809,
            a=1.4094,
            b=0.0041934,
            d=3.0343e-07,
            h=3.7975e-05,
            e=1.6818,
            f=0.0016741,
            e2=0.81283,
            f2=0.0060998,
            g=6.2476e-06,
        ),
        3.09e9,
        28_672,
    ),
    # Llama 3.1 8B
    "8b": Model(
        Timing(
            m=5.0552,
            a=1.7524,
            b=0.021628,
            d=8.736e-07,
            h=7.9465e-05,
            e=4.6232,
            f=0.0060347,
            e2=3.4491,
            f2=0.015602,
            g=2.8053e-05,
        ),
        16.06e9,
        131_072,
    ),
    "32b": Model(_H200_32B, 65.52e9, 262_144),
}


def _larger_model(
    model: Model, parameters: float, layers: float, weight_bytes: float, kv_bytes_per_token: int
) -> Model:
    """Scale a model to `parameters` times its parameters and `layers` times its layers."""
    base, work_ms = model.timing, _weights_ms(model)
    e, f, f2 = work_ms * parameters + (base.e - work_ms) * layers, base.f * layers, base.f2 * parameters
    timing = Timing(
        m=work_ms * parameters + (base.m - work_ms) * layers,
        a=base.a * layers,
        b=base.b * parameters,
        d=base.d * layers,
        h=base.h * layers,
        e=e,
        f=f,
        e2=e - (f2 - f) * _compute_bound_batch(base),
        f2=f2,
        g=base.g * layers,
    )
    return Model(timing, weight_bytes, kv_bytes_per_token)


def _weights_ms(model: Model) -> float:
    """The part of m and e that reads the weights once on an H200."""
    return model.weight_bytes / (GPUS["h200"].memory_gb_per_s * MEMORY_EFFICIENCY * 1e6)


def _compute_bound_batch(timing: Timing) -> float:
    """The batch size at which decoding turns from memory bound to compute bound."""
    return (timing.e - timing.e2) / (timing.f2 - timing.f)


# Llama 3.1 70B
MODELS["70b"] = _larger_model(MODELS["32b"], _PARAMETERS_70B_TO_32B, _LAYERS_70B_TO_32B, 141.1e9, 327_680)

PROFILE_NAMES = tuple(f"{gpu}-{model}" for gpu in GPUS for model in MODELS)


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The hardware and model of a simulated engine. Construct one to use other coefficients."""

    name: str
    timing: Timing
    kv_tokens: int
    """Capacity of the KV cache on the GPUs."""
    kv_bytes_per_token: int
    gpus: int = 1
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024

    def num_blocks(self, block_size: int) -> int:
        """Return the blocks of the KV cache, including the null block."""
        return max(2, self.kv_tokens // block_size)


def profile(name: str) -> Profile:
    """Return the profile with this name: `gpu-model`, or `NxGPU-model` to choose the number of GPUs."""
    count, _, rest = name.partition("x") if name[:1].isdigit() else ("", "", name)
    gpu_name, _, model_name = rest.partition("-")
    gpu, model = GPUS.get(gpu_name), MODELS.get(model_name)
    if gpu is None or model is None or (count and (not count.isdigit() or int(count) < 1)):
        raise ValueError(f"no profile {name!r}; choose {', '.join(PROFILE_NAMES)}, or NxGPU-model for N GPUs")
    if count:
        gpus = int(count)
    else:
        gpus = next((n for n in (1, 2, 4, 8, 16) if _kv_tokens(gpu, model, n) >= MIN_KV_TOKENS), 16)
    kv_tokens = _kv_tokens(gpu, model, gpus)
    if kv_tokens < 1024:
        raise ValueError(f"profile {name!r}: the model does not fit into {gpus} of these GPUs")
    return Profile(
        name=name,
        timing=_scale_timing(model, gpu, gpus),
        kv_tokens=kv_tokens,
        kv_bytes_per_token=model.kv_bytes_per_token,
        gpus=gpus,
        max_num_batched_tokens=gpu.max_num_batched_tokens,
        max_num_seqs=gpu.max_num_seqs,
    )


def _kv_tokens(gpu: Gpu, model: Model, gpus: int) -> int:
    activations = gpu.max_num_batched_tokens * ACTIVATION_BYTES_PER_BATCHED_TOKEN
    room = gpus * (gpu.memory_mib * 2**20 * MEMORY_UTILISATION - activations) - model.weight_bytes
    return max(0, int(room / model.kv_bytes_per_token)) // 16 * 16


def _scale_timing(model: Model, gpu: Gpu, gpus: int) -> Timing:
    base, h200 = model.timing, GPUS["h200"]
    speed_up = gpus * PARALLEL_EFFICIENCY ** log2(gpus)
    compute = h200.tflops * h200.efficiency / (gpu.tflops * gpu.efficiency) / speed_up
    memory = h200.memory_gb_per_s / gpu.memory_gb_per_s / speed_up
    added_weights_ms = _weights_ms(model) * (memory - 1)
    e, f, f2 = base.e + added_weights_ms, base.f * memory, base.f2 * compute
    return Timing(
        m=base.m + added_weights_ms,
        a=base.a,
        b=base.b * compute,
        d=base.d * compute,
        h=base.h * memory,
        e=e,
        f=f,
        e2=e - (f2 - f) * _compute_bound_batch(base) * memory / compute,
        f2=f2,
        g=base.g * memory,
        overhead_ms=base.overhead_ms,
        reload_us_per_token=model.kv_bytes_per_token / (gpu.link_gb_per_s * LINK_EFFICIENCY * gpus * 1e3),
    )
