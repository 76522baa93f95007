// Ops that torch selects by device type instead of by registered kernels: convolution, scaled dot product attention,
// and the cells of LSTM and GRU. Each computes what the backing device computes.
#include "device.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

namespace infini::device {
namespace {

using at::Tensor;

Tensor below_tensor(const Tensor &tensor) {
    if (!tensor.defined() || tensor.device().type() != kInfini) {
        return tensor;
    }
    return to_plain_twin(tensor);
}

std::optional<Tensor> below_tensor(const std::optional<Tensor> &tensor) {
    return tensor && tensor->defined() ? std::optional<Tensor>(below_tensor(*tensor)) : std::nullopt;
}

Tensor above_tensor(const Tensor &tensor) {
    return tensor.defined() ? from_result(tensor) : tensor;
}

void check_same(const Tensor &first, const Tensor &other, const char *op) {
    TORCH_CHECK(!other.defined() || other.device() == first.device(),
                "Expected all tensors to be on the same device, but found at least two devices, ", first.device(),
                " and ", other.device(), "! (in a call of ", op, ")");
}

// ---- convolution ----

Tensor convolve(const Tensor &input, const Tensor &weight, const std::optional<Tensor> &bias, at::IntArrayRef stride,
                at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                int64_t groups) {
    check_same(input, weight, "aten::convolution");
    check_same(input, bias.value_or(Tensor()), "aten::convolution");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return above_tensor(at::convolution(below_tensor(input), below_tensor(weight), below_tensor(bias), stride, padding,
                                        dilation, transposed, output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolve_backward(const Tensor &gradient, const Tensor &input, const Tensor &weight,
                                                     at::OptionalIntArrayRef bias_sizes, at::IntArrayRef stride,
                                                     at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                                                     at::IntArrayRef output_padding, int64_t groups,
                                                     std::array<bool, 3> wanted) {
    check_same(input, weight, "aten::convolution_backward");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [to_input, to_weight, to_bias] =
        at::convolution_backward(below_tensor(gradient), below_tensor(input), below_tensor(weight), bias_sizes, stride,
                                 padding, dilation, transposed, output_padding, groups, wanted);
    return {above_tensor(to_input), above_tensor(to_weight), above_tensor(to_bias)};
}

std::tuple<Tensor, Tensor, Tensor> convolve_backward_overrideable(const Tensor &gradient, const Tensor &input,
                                                                  const Tensor &weight, at::IntArrayRef stride,
                                                                  at::IntArrayRef padding, at::IntArrayRef dilation,
                                                                  bool transposed, at::IntArrayRef output_padding,
                                                                  int64_t groups, std::array<bool, 3> wanted) {
    const int64_t channels = gradient.size(1);
    return convolve_backward(gradient, input, weight, at::IntArrayRef(channels), stride, padding, dilation, transposed,
                             output_padding, groups, wanted);
}

// ---- attention ----

int64_t attention_choice(const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &mask,
                         double dropout, bool causal, std::optional<double> scale, bool grouped) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const bool is_traced = q.key_set().has(c10::DispatchKey::Python); // a fake has no memory, and so no twin
    if (is_traced || (backing.type == c10::kCPU && mask && mask->defined() && mask->requires_grad())) {
        return static_cast<int64_t>(sdp::SDPBackend::math);
    }
    const int64_t chosen = at::_fused_sdp_choice(below_tensor(q), below_tensor(k), below_tensor(v), below_tensor(mask),
                                                 dropout, causal, scale, grouped);
    // torch calls flash attention with CUDA's signature for devices other than the CPU; the CPU's is called below.
    return backing.type == c10::kCPU && chosen == static_cast<int64_t>(sdp::SDPBackend::flash_attention)
               ? static_cast<int64_t>(sdp::SDPBackend::overrideable)
               : chosen;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
attention(const Tensor &q, const Tensor &k, const Tensor &v, const std::optional<Tensor> &mask, double dropout,
          bool causal, bool, std::optional<double> scale) {
    TORCH_CHECK_NOT_IMPLEMENTED(backing.type == c10::kCPU, "infini: this attention is the CPU's");
    check_same(q, k, "aten::scaled_dot_product_attention");
    check_same(q, v, "aten::scaled_dot_product_attention");
    check_same(q, mask.value_or(Tensor()), "aten::scaled_dot_product_attention");
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [output, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(
        below_tensor(q), below_tensor(k), below_tensor(v), dropout, causal, below_tensor(mask), scale);
    const auto whole = q.options().dtype(at::kLong);
    return {above_tensor(output),  above_tensor(log_sum), Tensor(), Tensor(), q.size(2), k.size(2),
            at::empty({0}, whole), at::empty({0}, whole), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(const Tensor &gradient, const Tensor &q, const Tensor &k,
                                                              const Tensor &v, const Tensor &mask, std::array<bool, 4>,
                                                              const Tensor &output, const Tensor &log_sum,
                                                              const Tensor &, const Tensor &, int64_t, int64_t,
                                                              double dropout, bool causal, const Tensor &,
                                                              const Tensor &, std::optional<double> scale) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [to_q, to_k, to_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        below_tensor(gradient), below_tensor(q), below_tensor(k), below_tensor(v), below_tensor(output),
        below_tensor(log_sum), dropout, causal,
        mask.defined() ? std::optional<Tensor>(below_tensor(mask)) : std::nullopt, scale);
    return {above_tensor(to_q), above_tensor(to_k), above_tensor(to_v), Tensor()};
}

// ---- cells ----
// The CPU's steps in the CPU's order, except that torch passes the biases separately from the products, so the last bit
// can differ from the CPU's.

Tensor with_bias(const Tensor &gates, const std::optional<Tensor> &bias) {
    return bias && bias->defined() ? gates + *bias : gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor &input_gates, const Tensor &hidden_gates, const Tensor &cx,
                                             const std::optional<Tensor> &input_bias,
                                             const std::optional<Tensor> &hidden_bias) {
    const Tensor gates = with_bias(hidden_gates, hidden_bias) + with_bias(input_gates, input_bias);
    auto parts = gates.chunk(4, 1);
    const Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
    const Tensor cy = (forget * cx).add_(in * cell);
    return {out * cy.tanh(), cy, at::cat({in, forget, cell, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor> &to_hy,
                                                      const std::optional<Tensor> &to_cy, const Tensor &cx,
                                                      const Tensor &cy, const Tensor &workspace, bool has_bias) {
    const bool has_hy = to_hy && to_hy->defined(), has_cy = to_cy && to_cy->defined();
    if (!has_hy && !has_cy) {
        return {};
    }
    auto parts = workspace.chunk(4, 1);
    const Tensor &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
    const Tensor squashed = cy.tanh();
    const Tensor hy = has_hy ? *to_hy : at::zeros_like(cy);
    Tensor along = at::tanh_backward(hy * out, squashed); // the gradient that reaches cy
    if (has_cy) {
        along = along + *to_cy;
    }
    const Tensor gates = at::cat({at::sigmoid_backward(along * cell, in), at::sigmoid_backward(along * cx, forget),
                                  at::tanh_backward(along * in, cell), at::sigmoid_backward(hy * squashed, out)},
                                 1);
    return {gates, along * forget, has_bias ? gates.sum(0, false) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor &input_gates, const Tensor &hidden_gates, const Tensor &hx,
                                    const std::optional<Tensor> &input_bias, const std::optional<Tensor> &hidden_bias) {
    auto in = with_bias(input_gates, input_bias).chunk(3, 1);
    auto hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
    const Tensor reset = hidden[0].add(in[0]).sigmoid_(), update = hidden[1].add(in[1]).sigmoid_();
    const Tensor fresh = in[2].add(hidden[2].mul(reset)).tanh_();
    return {(hx - fresh).mul_(update).add_(fresh), at::cat({reset, update, fresh, hx, hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor &to_hy, const Tensor &workspace,
                                                                     bool has_bias) {
    auto parts = workspace.chunk(5, 1);
    const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3], &hidden = parts[4];
    const Tensor to_fresh = at::tanh_backward(to_hy * (1 - update), fresh);
    const Tensor to_update = at::sigmoid_backward(to_hy * (hx - fresh), update);
    const Tensor to_reset = at::sigmoid_backward(to_fresh * hidden, reset);
    const Tensor in = at::cat({to_reset, to_update, to_fresh}, 1);
    const Tensor of_hidden = at::cat({to_reset, to_update, to_fresh * reset}, 1);
    return {in, of_hidden, to_hy * update, has_bias ? in.sum(0, false) : Tensor(),
            has_bias ? of_hidden.sum(0, false) : Tensor()};
}

// ---- histc ----

// Accepts integers too, as on CUDA: transformers' mixture-of-experts models count tokens with it on every device except
// the CPU. Counts in float64 are exact up to 2^53.
Tensor histogram(const Tensor &x, int64_t bins, const at::Scalar &least, const at::Scalar &most) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const Tensor values = below_tensor(x);
    const bool of_integers = backing.type == c10::kCPU && c10::isIntegralType(x.scalar_type(), false);
    return above_tensor(of_integers ? at::histc(values.to(at::kDouble), bins, least, most).to(x.scalar_type())
                                    : at::histc(values, bins, least, most));
}

} // namespace

void register_overrideable() {
    static auto *library =
        new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    library->impl("convolution", &convolve);
    library->impl("convolution_overrideable", &convolve);
    library->impl("convolution_backward", &convolve_backward);
    library->impl("convolution_backward_overrideable", &convolve_backward_overrideable);
    library->impl("_fused_sdp_choice", &attention_choice);
    library->impl("histc", &histogram);
    library->impl("_scaled_dot_product_fused_attention_overrideable", &attention);
    library->impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
    library->impl("_thnn_fused_lstm_cell", &lstm_cell);
    library->impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
    library->impl("_thnn_fused_gru_cell", &gru_cell);
    library->impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
    at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&attention_choice);
}

} // namespace infini::device
