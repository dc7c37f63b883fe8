"""Overrides that select each model component; the contract tests of components run all of them."""

WINDOWS = "model.attention.sliding_window=9 model.attention.layer_pattern=[sliding,full]"
COMPONENTS = {
    "head_dim": "model.attention.head_dim=24",
    "biases": "model.attention.qkv_bias=true model.attention.output_bias=true",
    "qk_norm": "model.attention.qk_norm=true",
    "qk_norm projection": "model.attention.qk_norm=true model.attention.qk_norm_scope=projection",
    "window": WINDOWS,
    "attention softcap": "model.attention.logit_softcap=2",
    "sinks": "model.attention.sinks=true",
    "rope": "model.rope.scaling=yarn model.rope.factor=4 model.rope.original_max_positions=16 "
    "model.rope.partial_rotary_factor=0.5 model.rope.layer_pattern=[true,false]",
    "sliding theta": f"model.rope.sliding_theta=100 {WINDOWS}",
    "experts": "model.mlp.kind=moe model.mlp.moe.num_experts=4",
    "shared expert": "model.mlp.kind=moe model.mlp.moe.num_experts=4 model.mlp.moe.num_groups=2 "
    "model.mlp.moe.scoring=sigmoid model.mlp.moe.routed_scale=2 model.mlp.moe.shared_size=88 "
    "model.mlp.moe.shared_gate=true",
    "router losses": "model.mlp.kind=moe model.mlp.moe.num_experts=4 model.mlp.moe.balance_loss=0.3 "
    "model.mlp.moe.z_loss=0.1",
    "dense and sparse layers": "model.mlp.kind=moe model.mlp.moe.num_experts=4 "
    "model.mlp.moe.every=2 model.mlp.moe.intermediate_size=48",
    "router bias": "model.mlp.kind=moe model.mlp.moe.num_experts=4 "
    "model.mlp.moe.bias_update_rate=0.002",
    "post-norm": "model.norm.placement=post",
    "sandwich, zero-centered": "model.norm.placement=sandwich model.norm.zero_centered=true",
    "geglu": "model.mlp.activation=geglu",
    "relu2": "model.mlp.activation=relu2",
    "gelu": "model.mlp.activation=gelu",
    "tied head": "model.tie_embeddings=true model.embedding.scale_by_sqrt_hidden=true",
    "head": "model.head.logit_softcap=3 model.head.z_loss=0.01",
    "multipliers": "model.residual_multiplier=0.5 model.embedding.multiplier=3",
}
