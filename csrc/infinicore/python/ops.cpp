// The ops, each as X(...), which allocates its result, and X_(out, ...), which writes it. While a graph is recorded a
// call is noted; otherwise it computes, without the GIL.
#include "bindings.h"

#include <exception>

namespace infinicore::python {

namespace {

// Tells a recording that a call has thrown.
class Watch {
public:
    ~Watch() {
        if (std::uncaught_exceptions() > before_) {
            context::GraphRecording::op_failed();
        }
    }

private:
    const int before_ = std::uncaught_exceptions();
};

} // namespace

void bind_ops(py::module_ &module) {
    const auto input = py::arg("input"), out = py::arg("out"), weight = py::arg("weight");
    const auto a = py::arg("a"), b = py::arg("b"), q = py::arg("q"), k = py::arg("k"), v = py::arg("v");
    const auto k_cache = py::arg("k_cache"), v_cache = py::arg("v_cache"), pos = py::arg("pos");
    const auto no_bias = py::arg("bias") = py::none(), no_slopes = py::arg("alibi_slopes") = py::none();
    const auto epsilon = py::arg("epsilon") = 1e-5f, alpha = py::arg("alpha") = 1.0f, scale = py::arg("scale") = 1.0f;
    const auto release = CallWithoutGil<Watch>();

    module.def("add", &op::add, a, b, release);
    module.def("add_", &op::add_, out, a, b, release);
    module.def("mul", &op::mul, a, b, release);
    module.def("mul_", &op::mul_, out, a, b, release);
    module.def("matmul", &op::matmul, a, b, alpha, release);
    module.def("matmul_", &op::matmul_, out, a, b, alpha, release);
    module.def("linear", &op::linear, input, weight, no_bias, release);
    module.def("linear_", &op::linear_, out, input, weight, no_bias, release);
    module.def("rms_norm", &op::rms_norm, input, weight, epsilon, release);
    module.def("rms_norm_", &op::rms_norm_, out, input, weight, epsilon, release);
    module.def("add_rms_norm", &op::add_rms_norm, a, b, weight, epsilon, release);
    module.def("add_rms_norm_", &op::add_rms_norm_, out, py::arg("residual_out"), a, b, weight, epsilon, release);
    module.def("attention", &op::attention, q, k, v, k_cache, v_cache, pos, release);
    module.def("attention_", &op::attention_, out, q, k, v, k_cache, v_cache, pos, release);
    module.def("causal_softmax", &op::causal_softmax, input, release);
    module.def("causal_softmax_", &op::causal_softmax_, out, input, release);
    module.def("embedding", &op::embedding, input, weight, release);
    module.def("embedding_", &op::embedding_, out, input, weight, release);
    const auto x = py::arg("x"), sin = py::arg("sin_table"), cos = py::arg("cos_table"), algo = py::arg("algo");
    module.def("rope", &op::rope, x, pos, sin, cos, algo, release);
    module.def("rope_", &op::rope_, out, x, pos, sin, cos, algo, release);
    const auto logits = py::arg("logits"), random = py::arg("random_val"), topp = py::arg("topp");
    const auto topk = py::arg("topk"), temperature = py::arg("temperature");
    module.def("random_sample", &op::random_sample, logits, random, topp, topk, temperature, release);
    module.def("random_sample_", &op::random_sample_, out, logits, random, topp, topk, temperature, release);
    module.def("silu", &op::silu, input, release);
    module.def("silu_", &op::silu_, out, input, release);
    module.def("swiglu", &op::swiglu, a, b, release);
    module.def("swiglu_", &op::swiglu_, out, a, b, release);
    module.def("rearrange", &op::rearrange, x, release);
    module.def("rearrange_", &op::rearrange_, out, x, release);
    module.def("paged_caching_", &op::paged_caching_, k_cache, v_cache, k, v, py::arg("slot_mapping"), release);
    const auto tables = py::arg("block_tables"), lens = py::arg("cache_lens");
    module.def("paged_attention", &op::paged_attention, q, k_cache, v_cache, tables, lens, no_slopes, scale, release);
    module.def("paged_attention_", &op::paged_attention_, out, q, k_cache, v_cache, tables, lens, no_slopes, scale,
               release);
    const auto total = py::arg("total_kv_lens"), cumulated = py::arg("cum_seqlens_q");
    module.def("paged_attention_prefill", &op::paged_attention_prefill, q, k_cache, v_cache, tables, total, cumulated,
               no_slopes, scale, release);
    module.def("paged_attention_prefill_", &op::paged_attention_prefill_, out, q, k_cache, v_cache, tables, total,
               cumulated, no_slopes, scale, release);
}

} // namespace infinicore::python
