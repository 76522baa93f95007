// Tests nn::Embedding, nn::RMSNorm and nn::RoPE: tables against long double, results, LongRoPE, errors.
#include <algorithm>
#include <cmath>

#include "nn_values.h"

namespace {

float of_half(uint16_t bits, DataType dtype) {
    if (dtype == DataType::BF16) {
        const uint32_t word = static_cast<uint32_t>(bits) << 16;
        float value = 0;
        std::memcpy(&value, &word, sizeof value);
        return value;
    }
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const float magnitude = exponent ? std::ldexp(1024.f + static_cast<float>(fraction), exponent - 25)
                                     : std::ldexp(static_cast<float>(fraction), -24);
    return bits >> 15 ? -magnitude : magnitude;
}

void test_embedding() {
    const Floats w = whole_numbers(5 * 3, 1);
    Tensor::ones({5, 3}, DataType::F32, device); // so that the memory that comes next is not zeros by chance
    nn::Embedding embedding(5, 3, -2, DataType::F32, device);
    CHECK(embedding.padding_idx() == 3 && embedding.num_embeddings() == 5 && embedding.embedding_dim() == 3);
    CHECK(values_of(embedding.weight()->narrow({{0, 3, 1}})) == Floats(3));
    CHECK(embedding.extra_repr() ==
          "num_embeddings=5, embedding_dim=3, padding_idx=3, dtype=" + toString(DataType::F32));
    embedding.load_parameter("weight", floats(w, {5, 3}));
    const auto rows = [&](const std::vector<int64_t> &ids) {
        Floats found;
        for (const int64_t id : ids) {
            found.insert(found.end(), w.begin() + id * 3, w.begin() + id * 3 + 3);
        }
        return found;
    };
    const std::vector<int64_t> ids{4, 0, 3, 3, 1, 2}, others{1, 1, 0, 4, 2, 3};
    for (const Device on : {device, Device::cpu()}) {
        Tensor indices = tensor(ids, {2, 3}, DataType::I64, on);
        const Tensor found = embedding.forward(indices);
        CHECK(found->shape() == (Shape{2, 3, 3}) && found->device() == device && values_of(found) == rows(ids));
        const Tensor narrow = tensor(std::vector<int32_t>{2, 4}, {2}, DataType::I32, on);
        CHECK(values_of(embedding.forward(narrow)) == rows({2, 4}));
        context::setDevice(device);
        context::startGraphRecording();
        const Tensor replayed = embedding.forward(indices);
        const auto graph = context::stopGraphRecording();
        for (const auto &next : {others, ids}) {
            indices->copy_from(tensor(next, {2, 3}, DataType::I64, on));
            graph->run();
            CHECK(values_of(replayed) == rows(next));
        }
    }
    CHECK(!nn::Embedding(5, 3).padding_idx());
    THROWS(nn::Embedding(5, 3, 5), "infinicore::nn::Embedding: padding_idx must be from -5 to 4, got 5");
    THROWS(nn::Embedding(5, 3, -6), "infinicore::nn::Embedding: padding_idx must be from -5 to 4, got -6");
}

void test_rms_norm() {
    nn::RMSNorm norm(7, 0.125, DataType::F32, device);
    CHECK(norm.normalized_shape() == 7 && norm.eps() == 0.125 && norm.dtype() == DataType::F32);
    CHECK(values_of(norm.weight()) == Floats(7, 1));
    CHECK(norm.extra_repr() == "normalized_shape=7, eps=0.125, dtype=" + toString(DataType::F32));
    const Floats w = whole_numbers(7, 1), x = whole_numbers(21, 2);
    norm.load_parameter("weight", floats(w, {7}));
    const Floats y = values_of(norm.forward(floats(x, {3, 7})));
    for (size_t row = 0; row < 3; ++row) {
        double squares = 0;
        for (size_t i = 0; i < 7; ++i) {
            squares += static_cast<double>(x[row * 7 + i]) * x[row * 7 + i];
        }
        for (size_t i = 0; i < 7; ++i) {
            const double exact = x[row * 7 + i] / std::sqrt(squares / 7 + 0.125) * w[i];
            CHECK(std::fabs(y[row * 7 + i] - exact) <= 4e-7 * std::fabs(exact)); // a few roundings of float
        }
    }
}

struct Tables : nn::RoPE {
    using nn::RoPE::cos_cache_;
    using nn::RoPE::RoPE;
    using nn::RoPE::sin_cache_;
};

// Angles in float128 would be the reference; long double has 11 bits more than double, which is enough to see a mistake.
long double angle_of(size_t position, size_t pair, size_t head_dim, double theta, double factor = 1) {
    return position * std::pow(static_cast<long double>(theta), -2.0L * pair / head_dim) / factor;
}

void check_table(const Tensor &table, DataType dtype, const std::function<long double(size_t, size_t)> &exact) {
    const size_t positions = table->size(0), pairs = table->size(1);
    CHECK(table->dtype() == dtype);
    const std::vector<uint8_t> bytes = [&] {
        const Tensor host = table->to(Device::cpu());
        const auto *const data = reinterpret_cast<const uint8_t *>(host->data());
        return std::vector<uint8_t>(data, data + host->nbytes());
    }();
    // Half a unit in the last place, and what double's angles are off.
    const int bits = dtype == DataType::F16 ? 11 : dtype == DataType::BF16 ? 8 : dtype == DataType::F32 ? 24 : 53;
    for (size_t position = 0; position < positions; ++position) {
        for (size_t pair = 0; pair < pairs; ++pair) {
            const size_t at = position * pairs + pair;
            long double value = 0;
            if (dtype == DataType::F32 || dtype == DataType::F64) {
                float single = 0;
                double twice = 0;
                dtype == DataType::F32 ? std::memcpy(&single, &bytes[at * 4], 4)
                                       : std::memcpy(&twice, &bytes[at * 8], 8);
                value = dtype == DataType::F32 ? single : twice;
            } else {
                uint16_t half = 0;
                std::memcpy(&half, &bytes[at * 2], 2);
                value = of_half(half, dtype);
            }
            const long double wanted = exact(position, pair), size = std::fabs(wanted);
            const int exponent = size == 0 ? -24 : std::max(std::ilogb(size), dtype == DataType::F16 ? -14 : -126);
            const long double half_unit = std::ldexp(1.0L, exponent - bits);
            const long double of_angle = (static_cast<long double>(position) + 1) * 4e-16L;
            if (!(std::fabs(value - wanted) <= half_unit * 1.0001L + of_angle)) {
                std::printf("position %zu, pair %zu, %s: %.17Lg, not %.17Lg\n", position, pair, toString(dtype).c_str(),
                            value, wanted);
                ++failures();
                return;
            }
        }
    }
}

void test_rope_tables() {
    for (const DataType dtype : {DataType::F64, DataType::F32, DataType::F16, DataType::BF16}) {
        for (const auto &[head_dim, theta] : {std::pair<size_t, double>{2, 10000.0}, {34, 500000.0}, {64, 1.5}}) {
            const Tables rope(head_dim, 300, theta, nn::RoPE::Algo::GPT_NEOX, dtype, device);
            CHECK(rope.sin_cache_->shape() == (Shape{300, head_dim / 2}) && rope.sin_cache_->device() == device);
            const auto angle = [head_dim = head_dim, theta = theta](size_t position, size_t pair) {
                return angle_of(position, pair, head_dim, theta);
            };
            check_table(rope.sin_cache_, dtype, [&](size_t p, size_t i) { return std::sin(angle(p, i)); });
            check_table(rope.cos_cache_, dtype, [&](size_t p, size_t i) { return std::cos(angle(p, i)); });
        }
    }
    CHECK(nn::RoPE(4, 2).state_dict().empty()); // tables are buffers
}

void test_rope() {
    const size_t dim = 6, heads = 2, tokens = 3;
    const std::vector<int64_t> positions{5, 0, 9}, later{1, 2, 3};
    const Floats x = whole_numbers(tokens * heads * dim, 1);
    for (const auto algo : {nn::RoPE::Algo::GPT_J, nn::RoPE::Algo::GPT_NEOX}) {
        const nn::RoPE rope(dim, 10, 100.0, algo, DataType::F32, device);
        CHECK(rope.head_dim() == dim && rope.max_seq_len() == 10 && rope.theta() == 100 && rope.algo() == algo);
        const auto check = [&](const Tensor &y, const std::vector<int64_t> &at) {
            const Floats got = values_of(y);
            for (size_t row = 0; row < tokens * heads; ++row) {
                for (size_t pair = 0; pair < dim / 2; ++pair) {
                    const bool neighbours = algo == nn::RoPE::Algo::GPT_J;
                    const size_t first = row * dim + (neighbours ? 2 * pair : pair);
                    const size_t second = neighbours ? first + 1 : first + dim / 2;
                    const long double turn = angle_of(static_cast<size_t>(at[row / heads]), pair, dim, 100);
                    const long double s = std::sin(turn), c = std::cos(turn);
                    // Products and a difference of numbers up to 4, in float.
                    CHECK(std::fabs(got[first] - (x[first] * c - x[second] * s)) < 2e-6L);
                    CHECK(std::fabs(got[second] - (x[first] * s + x[second] * c)) < 2e-6L);
                }
            }
        };
        const Shape shape{tokens, heads, dim};
        const Tensor input = floats(x, shape);
        Tensor pos = tensor(positions, {tokens}, DataType::I64);
        check(rope.forward(input, pos), positions);
        CHECK(values_of(input) == x);
        const Tensor y = Tensor::empty(shape, DataType::F32, device);
        const Tensor same = rope.forward(y, input, pos);
        check(y, positions);
        CHECK(same->data() == y->data() && values_of(input) == x);
        const Tensor own = floats(x, shape);
        CHECK(rope.forward(own, pos, true)->data() == own->data());
        check(own, positions);
        context::setDevice(device);
        context::startGraphRecording();
        const Tensor replayed = rope.forward(input, pos);
        const auto graph = context::stopGraphRecording();
        for (const auto &next : {later, positions}) {
            pos->copy_from(tensor(next, {tokens}, DataType::I64));
            graph->run();
            check(replayed, next);
        }
    }
    CHECK(nn::RoPE(4, 2).extra_repr() ==
          "head_dim=4, max_seq_len=2, theta=10000, algo=GPT_J, dtype=" + toString(DataType::F32));
    const std::string name = "infinicore::nn::RoPE: ";
    THROWS(nn::RoPE(5, 2), name + "head_dim must be even and above 0, got 5");
    THROWS(nn::RoPE(0, 2), name + "head_dim must be even and above 0, got 0");
    THROWS(nn::RoPE(4, 2, 0), name + "theta must be finite and above 0, got 0");
    THROWS(nn::RoPE(4, 2, 1e4, nn::RoPE::Algo::GPT_J, DataType::I32),
           name + "dtype must be " + toString(DataType::F16) + ", " + toString(DataType::BF16) + ", " +
               toString(DataType::F32) + " or " + toString(DataType::F64) + ", got " + toString(DataType::I32));
}

void test_long_rope() {
    using Long = nn::RoPE::LongRopeConfig;
    const std::vector<float> brief{1, 1.25f}, stretched{2, 8};
    const auto check = [&](size_t length, float factor, const std::vector<float> &factors, long double magnitude) {
        const auto config = std::make_shared<Long>(brief, stretched, 16, factor);
        CHECK(config->type() == nn::RoPE::ScalingType::LONGROPE && config->factor() == factor);
        const Tables rope(4, length, 10000.0, nn::RoPE::Algo::GPT_NEOX, DataType::F64, device, config);
        const auto angle = [&](size_t p, size_t i) { return angle_of(p, i, 4, 10000.0, factors[i]); };
        check_table(rope.sin_cache_, DataType::F64,
                    [&](size_t p, size_t i) { return magnitude * std::sin(angle(p, i)); });
        check_table(rope.cos_cache_, DataType::F64,
                    [&](size_t p, size_t i) { return magnitude * std::cos(angle(p, i)); });
    };
    check(8, 1, brief, 1);
    check(16, 1, brief, 1);
    check(64, 1, stretched, std::sqrt(1.5L));   // 1 + ln 4 / ln 16
    check(17, 256, stretched, std::sqrt(3.0L)); // 1 + ln 256 / ln 16
    check(64, 0.5f, stretched, 1);
    const std::string name = "infinicore::nn::RoPE::LongRopeConfig: ";
    THROWS(Long(brief, stretched, 1), name + "original_max_position_embeddings must be at least 2, got 1");
    THROWS(Long(brief, stretched, 16, 0), name + "factor must be finite and above 0, got 0");
    THROWS(Long(brief, {1, -1}, 16), name + "long_factor must have finite numbers above 0, got -1");
    THROWS(nn::RoPE(8, 32, 1e4, nn::RoPE::Algo::GPT_J, DataType::F32, device,
                    std::make_shared<Long>(brief, stretched, 16)),
           "infinicore::nn::RoPE: long_factor must have 4 numbers, one for each pair of columns, got 2");
}

} // namespace

int main(int count, char **arguments) {
    device = device_of(count, arguments);
    CHECK_RUNS("embedding", test_embedding());
    CHECK_RUNS("rms norm", test_rms_norm());
    CHECK_RUNS("rope tables", test_rope_tables());
    CHECK_RUNS("rope", test_rope());
    CHECK_RUNS("long rope", test_long_rope());
    return failures() != 0;
}
