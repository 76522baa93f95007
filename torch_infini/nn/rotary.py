import torch
from torch import nn
class RotaryEmbedding(nn.Module):
    def __init__(self, head_dim, max_positions, theta=10000.0, scaling=None, partial=1.0, interleaved=False, dtype=None, device=None):
        super().__init__()
        inv=1.0/theta**(torch.arange(0,head_dim,2).float()/head_dim)
        a=torch.arange(max_positions).float()[:,None]*inv
        self.register_buffer('cos',a.cos().to(dtype),persistent=False); self.register_buffer('sin',a.sin().to(dtype),persistent=False)
        self.interleaved=interleaved
def rotary_settings(config):
    r=config.get('rope_parameters') or {}
    return dict(head_dim=config.get('head_dim') or config['hidden_size']//config['num_attention_heads'], max_positions=config['max_position_embeddings'], theta=r.get('rope_theta', config.get('rope_theta',10000.0)))
