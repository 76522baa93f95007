"""The functions of nn.functional that torch has under the same names, made from torch's by _adapter.py."""

from ._adapter import adapted as _adapted

adaptive_avg_pool1d = _adapted("nn.functional.adaptive_avg_pool1d")
adaptive_avg_pool2d = _adapted("nn.functional.adaptive_avg_pool2d")
adaptive_avg_pool3d = _adapted("nn.functional.adaptive_avg_pool3d")
adaptive_max_pool1d = _adapted("nn.functional.adaptive_max_pool1d")
adaptive_max_pool2d = _adapted("nn.functional.adaptive_max_pool2d")
affine_grid = _adapted("nn.functional.affine_grid")
alpha_dropout = _adapted("nn.functional.alpha_dropout")
avg_pool1d = _adapted("nn.functional.avg_pool1d")
avg_pool2d = _adapted("nn.functional.avg_pool2d")
avg_pool3d = _adapted("nn.functional.avg_pool3d")
batch_norm = _adapted("nn.functional.batch_norm")
bilinear = _adapted("nn.functional.bilinear")
binary_cross_entropy = _adapted("nn.functional.binary_cross_entropy")
binary_cross_entropy_with_logits = _adapted("nn.functional.binary_cross_entropy_with_logits")
celu = _adapted("nn.functional.celu")
conv1d = _adapted("nn.functional.conv1d")
conv2d = _adapted("nn.functional.conv2d")
conv3d = _adapted("nn.functional.conv3d")
conv_transpose1d = _adapted("nn.functional.conv_transpose1d")
conv_transpose2d = _adapted("nn.functional.conv_transpose2d")
conv_transpose3d = _adapted("nn.functional.conv_transpose3d")
cosine_embedding_loss = _adapted("nn.functional.cosine_embedding_loss")
cosine_similarity = _adapted("nn.functional.cosine_similarity")
cross_entropy = _adapted("nn.functional.cross_entropy")
dropout1d = _adapted("nn.functional.dropout1d")
dropout2d = _adapted("nn.functional.dropout2d")
dropout3d = _adapted("nn.functional.dropout3d")
elu = _adapted("nn.functional.elu")
feature_alpha_dropout = _adapted("nn.functional.feature_alpha_dropout")
fold = _adapted("nn.functional.fold")
fractional_max_pool2d = _adapted("nn.functional.fractional_max_pool2d")
fractional_max_pool3d = _adapted("nn.functional.fractional_max_pool3d")
gaussian_nll_loss = _adapted("nn.functional.gaussian_nll_loss")
glu = _adapted("nn.functional.glu")
group_norm = _adapted("nn.functional.group_norm")
gumbel_softmax = _adapted("nn.functional.gumbel_softmax")
hardshrink = _adapted("nn.functional.hardshrink")
hardsigmoid = _adapted("nn.functional.hardsigmoid")
hardswish = _adapted("nn.functional.hardswish")
hardtanh = _adapted("nn.functional.hardtanh")
hinge_embedding_loss = _adapted("nn.functional.hinge_embedding_loss")
huber_loss = _adapted("nn.functional.huber_loss")
instance_norm = _adapted("nn.functional.instance_norm")
interpolate = _adapted("nn.functional.interpolate")
kl_div = _adapted("nn.functional.kl_div")
l1_loss = _adapted("nn.functional.l1_loss")
leaky_relu = _adapted("nn.functional.leaky_relu")
local_response_norm = _adapted("nn.functional.local_response_norm")
log_softmax = _adapted("nn.functional.log_softmax")
logsigmoid = _adapted("nn.functional.logsigmoid")
lp_pool1d = _adapted("nn.functional.lp_pool1d")
lp_pool2d = _adapted("nn.functional.lp_pool2d")
lp_pool3d = _adapted("nn.functional.lp_pool3d")
margin_ranking_loss = _adapted("nn.functional.margin_ranking_loss")
max_pool1d = _adapted("nn.functional.max_pool1d")
max_pool2d = _adapted("nn.functional.max_pool2d")
max_pool3d = _adapted("nn.functional.max_pool3d")
max_unpool1d = _adapted("nn.functional.max_unpool1d")
max_unpool2d = _adapted("nn.functional.max_unpool2d")
max_unpool3d = _adapted("nn.functional.max_unpool3d")
mish = _adapted("nn.functional.mish")
mse_loss = _adapted("nn.functional.mse_loss")
multilabel_margin_loss = _adapted("nn.functional.multilabel_margin_loss")
multilabel_soft_margin_loss = _adapted("nn.functional.multilabel_soft_margin_loss")
nll_loss = _adapted("nn.functional.nll_loss")
normalize = _adapted("nn.functional.normalize")
one_hot = _adapted("nn.functional.one_hot")
pad = _adapted("nn.functional.pad")
pairwise_distance = _adapted("nn.functional.pairwise_distance")
pixel_shuffle = _adapted("nn.functional.pixel_shuffle")
pixel_unshuffle = _adapted("nn.functional.pixel_unshuffle")
prelu = _adapted("nn.functional.prelu")
relu6 = _adapted("nn.functional.relu6")
rrelu = _adapted("nn.functional.rrelu")
scaled_dot_product_attention = _adapted("nn.functional.scaled_dot_product_attention")
selu = _adapted("nn.functional.selu")
smooth_l1_loss = _adapted("nn.functional.smooth_l1_loss")
soft_margin_loss = _adapted("nn.functional.soft_margin_loss")
softmin = _adapted("nn.functional.softmin")
softplus = _adapted("nn.functional.softplus")
softshrink = _adapted("nn.functional.softshrink")
softsign = _adapted("nn.functional.softsign")
tanhshrink = _adapted("nn.functional.tanhshrink")
threshold = _adapted("nn.functional.threshold")
triplet_margin_loss = _adapted("nn.functional.triplet_margin_loss")
triplet_margin_with_distance_loss = _adapted("nn.functional.triplet_margin_with_distance_loss")
unfold = _adapted("nn.functional.unfold")

# fmt: off
__all__ = [
    "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d",
    "affine_grid", "alpha_dropout", "avg_pool1d", "avg_pool2d", "avg_pool3d", "batch_norm", "bilinear",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "celu", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "cosine_embedding_loss", "cosine_similarity",
    "cross_entropy", "dropout1d", "dropout2d", "dropout3d", "elu", "feature_alpha_dropout", "fold",
    "fractional_max_pool2d", "fractional_max_pool3d", "gaussian_nll_loss", "glu", "group_norm", "gumbel_softmax",
    "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "hinge_embedding_loss", "huber_loss", "instance_norm",
    "interpolate", "kl_div", "l1_loss", "leaky_relu", "local_response_norm", "log_softmax", "logsigmoid", "lp_pool1d",
    "lp_pool2d", "lp_pool3d", "margin_ranking_loss", "max_pool1d", "max_pool2d", "max_pool3d", "max_unpool1d",
    "max_unpool2d", "max_unpool3d", "mish", "mse_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss",
    "nll_loss", "normalize", "one_hot", "pad", "pairwise_distance", "pixel_shuffle", "pixel_unshuffle", "prelu",
    "relu6", "rrelu", "scaled_dot_product_attention", "selu", "smooth_l1_loss", "soft_margin_loss", "softmin",
    "softplus", "softshrink", "softsign", "tanhshrink", "threshold", "triplet_margin_loss",
    "triplet_margin_with_distance_loss", "unfold",
]
