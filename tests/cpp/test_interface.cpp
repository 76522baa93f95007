// InfiniCore's C++ interface as its callers use it: every class, method, default argument, constant and macro, with the
// type that it gives. All of it is checked by the compiler; what it computes is checked by the other programs.
// Usage: test_interface [CPU | NVIDIA]
#include <infinicore.hpp>

#include <type_traits>

// Nothing here depends on what infinicore.hpp takes in beyond these.
#include <infinicore/context/context.hpp>
#include <infinicore/device.hpp>
#include <infinicore/device_event.hpp>
#include <infinicore/dtype.hpp>
#include <infinicore/graph/graph.hpp>
#include <infinicore/memory.hpp>
#include <infinicore/nn.hpp>
#include <infinicore/ops.hpp>
#include <infinicore/ops/common/op.hpp>
#include <infinicore/tensor.hpp>

#include "check.h"
#include "device.h"

using namespace infinicore;

// The expression, which is not evaluated, has this type.
#define IS(expression, ...) static_assert(std::is_same_v<decltype(expression), __VA_ARGS__>, #expression)

namespace {

// For expressions that are not evaluated.
template <typename T> extern T &a;
template <typename T> T make();

// ---- devices, dtypes, memory, events ----

IS(Device(), Device);
IS(Device(Device::Type::CPU), Device);
IS(Device(Device::Type::CPU, Device::Index{}), Device);
static_assert(std::is_same_v<Device::Index, std::size_t>);
IS(make<const Device &>().getType(), const Device::Type &);
IS(make<const Device &>().getIndex(), const Device::Index &);
IS(make<const Device &>().toString(), std::string);
IS(Device::toString(Device::Type::CPU), std::string);
IS(make<const Device &>() == make<const Device &>(), bool);
IS(make<const Device &>() != make<const Device &>(), bool);
IS(Device::cpu(), Device);
constexpr Device::Type kTypes[] = {Device::Type::CPU,      Device::Type::NVIDIA, Device::Type::CAMBRICON,
                                   Device::Type::ASCEND,   Device::Type::METAX,  Device::Type::MOORE,
                                   Device::Type::ILUVATAR, Device::Type::KUNLUN, Device::Type::HYGON,
                                   Device::Type::QY,       Device::Type::COUNT};
constexpr DataType kDtypes[] = {DataType::BYTE, DataType::BOOL, DataType::I8,   DataType::I16, DataType::I32,
                                DataType::I64,  DataType::U8,   DataType::U16,  DataType::U32, DataType::U64,
                                DataType::F8,   DataType::F16,  DataType::F32,  DataType::F64, DataType::C16,
                                DataType::C32,  DataType::C64,  DataType::C128, DataType::BF16};
static_assert(DataType::INT8 == DataType::I8 && DataType::INT16 == DataType::I16 && DataType::INT32 == DataType::I32 &&
              DataType::INT64 == DataType::I64 && DataType::UINT8 == DataType::U8 &&
              DataType::UINT16 == DataType::U16 && DataType::UINT32 == DataType::U32 &&
              DataType::UINT64 == DataType::U64);
static_assert(DataType::FLOAT8 == DataType::F8 && DataType::FLOAT16 == DataType::F16 &&
              DataType::FLOAT32 == DataType::F32 && DataType::FLOAT64 == DataType::F64 &&
              DataType::BFLOAT16 == DataType::BF16);
static_assert(DataType::COMPLEX16 == DataType::C16 && DataType::COMPLEX32 == DataType::C32 &&
              DataType::COMPLEX64 == DataType::C64 && DataType::COMPLEX128 == DataType::C128);
IS(toString(DataType::F32), std::string);
IS(dsize(DataType::F32), size_t);

static_assert(std::is_same_v<Memory::Deleter, std::function<void(std::byte *)>>);
static_assert(std::is_constructible_v<Memory, std::byte *, size_t, Device, Memory::Deleter>);
static_assert(std::is_constructible_v<Memory, std::byte *, size_t, Device, Memory::Deleter, bool>);
IS(a<Memory>.data(), std::byte *);
IS(make<const Memory &>().device(), Device);
IS(make<const Memory &>().size(), size_t);
IS(make<const Memory &>().is_pinned(), bool);

IS(DeviceEvent(), DeviceEvent);
IS(DeviceEvent(uint32_t{}), DeviceEvent);
IS(DeviceEvent(Device()), DeviceEvent);
IS(DeviceEvent(Device(), uint32_t{}), DeviceEvent);
static_assert(!std::is_copy_constructible_v<DeviceEvent> && std::is_move_constructible_v<DeviceEvent>);
static_assert(!std::is_copy_assignable_v<DeviceEvent> && std::is_move_assignable_v<DeviceEvent>);
IS(a<DeviceEvent>.record(), void);
IS(a<DeviceEvent>.record(infinirtStream_t{}), void);
IS(a<DeviceEvent>.synchronize(), void);
IS(a<const DeviceEvent>.query(), bool);
IS(a<const DeviceEvent>.elapsed_time(a<const DeviceEvent>), float);
IS(a<const DeviceEvent>.wait(), void);
IS(a<const DeviceEvent>.wait(infinirtStream_t{}), void);
IS(a<const DeviceEvent>.device(), Device);
IS(a<const DeviceEvent>.get(), infinirtEvent_t);
IS(a<const DeviceEvent>.is_recorded(), bool);

// ---- tensors ----

static_assert(std::is_same_v<Size, std::size_t> && std::is_same_v<Stride, std::ptrdiff_t>);
static_assert(std::is_same_v<Shape, std::vector<Size>> && std::is_same_v<Strides, std::vector<Stride>>);
static_assert(std::is_constructible_v<TensorMetaData, const Shape &, const Strides &, const DataType &>);
IS(a<TensorMetaData>.shape, Shape);
IS(a<TensorMetaData>.strides, Strides);
IS(a<TensorMetaData>.dtype, DataType);
IS(a<TensorMetaData>.desc, infiniopTensorDescriptor_t);
IS(a<TensorData>.offset, size_t);
IS(a<TensorData>.memory, std::shared_ptr<Memory>);
IS(a<TensorSliceParams>.dim, size_t);
IS(a<TensorSliceParams>.start, size_t);
IS(a<TensorSliceParams>.len, Size);

const Shape shape;
const Strides strides;
const Device on;
constexpr DataType kF32 = DataType::F32;
IS(Tensor::empty(shape, kF32, on), Tensor);
IS(Tensor::empty(shape, kF32, on, true), Tensor);
IS(Tensor::strided_empty(shape, strides, kF32, on), Tensor);
IS(Tensor::strided_empty(shape, strides, kF32, on, true), Tensor);
IS(Tensor::zeros(shape, kF32, on), Tensor);
IS(Tensor::zeros(shape, kF32, on, true), Tensor);
IS(Tensor::ones(shape, kF32, on), Tensor);
IS(Tensor::ones(shape, kF32, on, true), Tensor);
IS(Tensor::from_blob(static_cast<void *>(nullptr), shape, kF32, on), Tensor);
IS(Tensor::strided_from_blob(static_cast<void *>(nullptr), shape, strides, kF32, on), Tensor);
static_assert(std::is_default_constructible_v<Tensor> && std::is_copy_constructible_v<Tensor>);
static_assert(std::is_move_constructible_v<Tensor> && std::is_copy_assignable_v<Tensor>);
static_assert(std::is_move_assignable_v<Tensor>);
IS(a<Tensor>.operator->(), TensorImpl *);
IS(a<const Tensor>.operator->(), const TensorImpl *);
IS(a<const Tensor>.operator bool(), bool);

static_assert(std::is_constructible_v<TensorImpl, const Shape &, const DataType &>);
static_assert(std::is_constructible_v<TensorImpl, const Shape &, const Strides &, const DataType &>);
IS(a<TensorImpl>.data(), std::byte *);
extern const TensorImpl &t;
IS(t.data(), const std::byte *);
IS(t.shape(), const Shape &);
IS(t.strides(), const Strides &);
IS(t.is_contiguous(), bool);
IS(t.ndim(), Size);
IS(t.numel(), Size);
IS(t.size(size_t{}), Size);
IS(t.element_size(), size_t);
IS(t.nbytes(), size_t);
IS(t.stride(size_t{}), Stride);
IS(t.dtype(), DataType);
IS(t.device(), Device);
IS(t.desc(), infiniopTensorDescriptor_t);
IS(t.is_pinned(), bool);
IS(t.info(), std::string);
IS(t.debug(std::string()), void);
IS(t.debug(), void);
IS(t.to_blob(), Tensor);
IS(t.to(Device()), Tensor);
IS(a<TensorImpl>.copy_from(Tensor()), void);
IS(t.contiguous(), Tensor);
IS(t.squeeze(size_t{}), Tensor);
IS(t.unsqueeze(size_t{}), Tensor);
IS(t.narrow({{size_t{}, size_t{}, Size{}}, {size_t{}, size_t{}, Size{}}}), Tensor);
IS(t.permute(shape), Tensor);
IS(t.view(shape), Tensor);
IS(t.as_strided(shape, strides), Tensor);

// What classes derived from them use.
struct OfTensor : Tensor {
    explicit OfTensor(std::shared_ptr<TensorImpl> impl) : Tensor(std::move(impl)) {}
    void check() const {
        IS(impl_, std::shared_ptr<TensorImpl>);
        IS(resume_from_blob_(), void);
    }
};
struct OfTensorImpl : TensorImpl {
    using Made = std::shared_ptr<TensorImpl>;
    void check() const {
        IS(TensorImpl::empty(shape(), kF32, on), Made);
        IS(TensorImpl::strided_empty(shape(), strides(), kF32, on, true), Made);
        IS(TensorImpl::zeros(shape(), kF32, on), Made);
        IS(TensorImpl::ones(shape(), kF32, on, true), Made);
        IS(TensorImpl::from_blob(static_cast<void *>(nullptr), shape(), kF32, on), Made);
        IS(TensorImpl::strided_from_blob(static_cast<void *>(nullptr), shape(), strides(), kF32, on), Made);
        IS(meta_, TensorMetaData);
        IS(data_, TensorData);
    }
};

// ---- context ----

using Allocated = std::shared_ptr<Memory>;
void *const address = nullptr;
IS(context::setDevice(Device()), void);
IS(context::getDevice(), Device);
IS(context::getDeviceCount(Device::Type::CPU), size_t);
IS(context::getStream(), infinirtStream_t);
IS(context::getInfiniopHandle(Device()), infiniopHandle_t);
IS(context::syncStream(), void);
IS(context::syncDevice(), void);
IS(context::allocateMemory(size_t{}), Allocated);
IS(context::allocateHostMemory(size_t{}), Allocated);
IS(context::allocatePinnedHostMemory(size_t{}), Allocated);
IS(context::memcpyH2D(address, address, size_t{}), void);
IS(context::memcpyH2D(address, address, size_t{}, false), void);
IS(context::memcpyD2H(address, address, size_t{}), void);
IS(context::memcpyD2D(address, address, size_t{}), void);
IS(context::memcpyD2D(address, address, size_t{}, false), void);
IS(context::memcpyH2H(address, address, size_t{}), void);
IS(context::createEvent(), infinirtEvent_t);
IS(context::createEventWithFlags(uint32_t{}), infinirtEvent_t);
IS(context::recordEvent(infinirtEvent_t{}), void);
IS(context::recordEvent(infinirtEvent_t{}, infinirtStream_t{}), void);
IS(context::queryEvent(infinirtEvent_t{}), bool);
IS(context::synchronizeEvent(infinirtEvent_t{}), void);
IS(context::destroyEvent(infinirtEvent_t{}), void);
IS(context::elapsedTime(infinirtEvent_t{}, infinirtEvent_t{}), float);
IS(context::streamWaitEvent(infinirtStream_t{}, infinirtEvent_t{}), void);
IS(context::isGraphRecording(), bool);
IS(context::startGraphRecording(), void);
IS(context::addGraphOperator(std::shared_ptr<graph::GraphOperator>()), void);
IS(context::stopGraphRecording(), std::shared_ptr<graph::Graph>);

// ---- graphs ----

static_assert(std::is_constructible_v<graph::GraphTensor, const Tensor &>);
static_assert(std::is_base_of_v<Tensor, graph::GraphTensor>);
IS(a<const graph::GraphTensor>.resume(), void);
IS(a<const graph::GraphOperator>.run(), void);
static_assert(std::is_destructible_v<graph::GraphOperator> && std::is_default_constructible_v<graph::Graph>);
IS(a<const graph::Graph>.run(), void);
struct OfOperator : graph::GraphOperator {
    void check() {
        IS(planned_meta_, void *);
        IS(runner_, run_schema);
        IS(deleter_, cleanup_schema);
        static_assert(std::is_same_v<run_schema, void (*)(void *)>);
        static_assert(std::is_same_v<cleanup_schema, void (*)(void **)>);
    }
};
struct OfGraph : graph::Graph {
    void check() {
        IS(add_operator(std::shared_ptr<graph::GraphOperator>()), void);
        IS(instantiate(), void);
        IS(op_list_, std::vector<std::shared_ptr<graph::GraphOperator>>);
    }
};

// ---- ops ----

using Two = op::common::OpDispatcher<void (*)(Tensor, Tensor)>;
using Three = op::common::OpDispatcher<void (*)(Tensor, Tensor, Tensor)>;
IS(a<Two>.registerDevice(Device::Type::CPU, nullptr), void);
IS(a<Two>.registerDevice(Device::Type::CPU, nullptr, false), void);
IS(a<Two>.registerDevice({Device::Type::CPU, Device::Type::NVIDIA}, nullptr), void);
IS(a<Two>.registerDevice({Device::Type::CPU, Device::Type::NVIDIA}, nullptr, false), void);
IS(a<Two>.registerAll(nullptr), void);
IS(a<Two>.registerAll(nullptr, false), void);
IS(a<const Two>.lookup(Device::Type::CPU), void (*)(Tensor, Tensor));

using Pair = std::pair<Tensor, Tensor>;
const Tensor x, y, z, w;
const std::optional<Tensor> none;
constexpr auto kAlgo = nn::RoPE::Algo::GPT_J;
using infinicore::op::operator+;
IS(op::Add::execute(x, y, z), void);
IS(op::Add::dispatcher(), Three &);
IS(op::add(x, y), Tensor);
IS(op::add_(x, y, z), void);
IS(x + y, Tensor);
IS(op::AddRMSNorm::execute(x, y, z, z, w), void);
IS(op::AddRMSNorm::execute(x, y, z, z, w, 1e-6f), void);
IS(op::AddRMSNorm::dispatcher(), op::common::OpDispatcher<op::AddRMSNorm::schema> &);
IS(op::add_rms_norm(x, y, w), Pair);
IS(op::add_rms_norm(x, y, w, 1e-6f), Pair);
IS(op::add_rms_norm_(x, y, z, z, w), void);
IS(op::add_rms_norm_(x, y, z, z, w, 1e-6f), void);
IS(op::Attention::execute(x, y, y, y, z, z, size_t{}), void);
IS(op::Attention::dispatcher(), op::common::OpDispatcher<op::Attention::schema> &);
IS(op::attention(y, y, y, z, z, size_t{}), Tensor);
IS(op::attention_(x, y, y, y, z, z, size_t{}), void);
IS(op::CausalSoftmax::execute(x, y), void);
IS(op::CausalSoftmax::dispatcher(), Two &);
IS(op::causal_softmax(x), Tensor);
IS(op::causal_softmax_(x, y), void);
IS(op::embedding(x, w), Tensor);
IS(op::embedding_(x, y, w), void);
IS(op::Gemm(x, y, z, 1.0f, 0.0f), op::Gemm);
IS(op::Gemm::execute(x, y, z, 1.0f, 0.0f), void);
IS(op::Gemm::plan_dispatcher().lookup(Device::Type::CPU), void *(*)(Tensor, Tensor, Tensor, float, float));
IS(op::Gemm::run_dispatcher().lookup(Device::Type::CPU), void (*)(void *));
IS(op::Gemm::cleanup_dispatcher().lookup(Device::Type::CPU), void (*)(void **));
IS(op::gemm(x, y), Tensor);
IS(op::gemm(x, y, 1.0f, 0.0f), Tensor);
IS(op::gemm_(x, y, z, 1.0f, 0.0f), void);
IS(op::linear(x, w, none), Tensor);
IS(op::linear_(x, y, w, none), void);
IS(op::matmul(x, y), Tensor);
IS(op::matmul(x, y, 0.5f), Tensor);
IS(op::matmul_(x, y, z), void);
IS(op::matmul_(x, y, z, 0.5f), void);
IS(op::Mul::execute(x, y, z), void);
IS(op::Mul::dispatcher(), Three &);
IS(op::mul(x, y), Tensor);
IS(op::mul_(x, y, z), void);
IS(op::Ones::execute(x), void);
IS(op::Ones::dispatcher(), op::common::OpDispatcher<op::Ones::schema> &);
IS(op::ones(), Tensor);
IS(op::ones_(x), void);
IS(op::PagedAttention::execute(x, y, z, z, w, w, none, 1.0f), void);
IS(op::PagedAttention::dispatcher(), op::common::OpDispatcher<op::PagedAttention::schema> &);
IS(op::paged_attention(y, z, z, w, w, none, 1.0f), Tensor);
IS(op::paged_attention_(x, y, z, z, w, w, none, 1.0f), void);
IS(op::PagedAttentionPrefill::execute(x, y, z, z, w, w, w, none, 1.0f), void);
IS(op::PagedAttentionPrefill::dispatcher(), op::common::OpDispatcher<op::PagedAttentionPrefill::schema> &);
IS(op::paged_attention_prefill(y, z, z, w, w, w, none, 1.0f), Tensor);
IS(op::paged_attention_prefill_(x, y, z, z, w, w, w, none, 1.0f), void);
IS(op::PagedCaching::execute(x, y, z, z, w), void);
IS(op::PagedCaching::dispatcher(), op::common::OpDispatcher<op::PagedCaching::schema> &);
IS(op::paged_caching_(x, y, z, z, w), void);
IS(op::RandomSample::execute(x, y, 0.5f, 0.9f, 50, 1.0f), void);
IS(op::RandomSample::dispatcher(), op::common::OpDispatcher<op::RandomSample::schema> &);
IS(op::random_sample(y, 0.5f, 0.9f, 50, 1.0f), Tensor);
IS(op::random_sample_(x, y, 0.5f, 0.9f, 50, 1.0f), void);
IS(op::Rearrange::execute(x, y), void);
IS(op::Rearrange::dispatcher(), Two &);
IS(op::rearrange(x), Tensor);
IS(op::rearrange_(x, y), void);
IS(op::RMSNorm::execute(x, y, w), void);
IS(op::RMSNorm::execute(x, y, w, 1e-6f), void);
IS(op::RMSNorm::dispatcher(), op::common::OpDispatcher<op::RMSNorm::schema> &);
IS(op::rms_norm(y, w), Tensor);
IS(op::rms_norm(y, w, 1e-6f), Tensor);
IS(op::rms_norm_(x, y, w), void);
IS(op::rms_norm_(x, y, w, 1e-6f), void);
IS(op::RoPE::execute(x, y, z, w, w, kAlgo), void);
IS(op::RoPE::dispatcher(), op::common::OpDispatcher<op::RoPE::schema> &);
IS(op::rope(y, z, w, w, kAlgo), Tensor);
IS(op::rope_(x, y, z, w, w, kAlgo), void);
IS(op::Silu::execute(x, y), void);
IS(op::Silu::dispatcher(), Two &);
IS(op::silu(x), Tensor);
IS(op::silu_(x, y), void);
IS(op::SwiGLU::execute(x, y, z), void);
IS(op::SwiGLU::dispatcher(), Three &);
IS(op::swiglu(x, y), Tensor);
IS(op::swiglu_(x, y, z), void);

// ---- modules ----

using Parameters = std::unordered_map<std::string, nn::Parameter>;
using Tensors = std::unordered_map<std::string, Tensor>;
using Modules = std::unordered_map<std::string, std::shared_ptr<nn::Module>>;
IS(a<const nn::Module>.state_dict(), const Parameters &);
IS(a<nn::Module>.load_state_dict(a<const Tensors>), void);
IS(a<nn::Module>.load_parameter("weight", x), void);
IS(a<nn::Module>.load_parameter_("weight", x), void);
IS(a<nn::Module>.load_parameter_from_blob("weight", address), void);
IS(nn::Parameter(), nn::Parameter);
IS(nn::Parameter(x), nn::Parameter);
IS(nn::Parameter(x, Size{}, Size{}, Size{1}), nn::Parameter);
IS(nn::Parameter(shape, kF32, on), nn::Parameter);
IS(nn::Parameter(shape, kF32, on, Size{}, Size{}, Size{1}), nn::Parameter);
IS(a<nn::Parameter>.load_blob(address), void);
IS(a<nn::Parameter>.load(x), void);
struct OfParameter : nn::Parameter {
    void check() {
        IS(tp_dim_, Size);
        IS(tp_rank_, Size);
        IS(tp_size_, Size);
    }
};

template <typename Base> struct OfLinear : Base {
    using Base::Base;
    void check(Tensor &input, Tensor &residual) const {
        IS(this->forward(input), Tensor);
        IS(this->nn::BaseLinear::forward(input, residual), Tensor);
        IS(this->in_features(), size_t);
        IS(this->out_features(), size_t);
        IS(this->has_bias(), bool);
        IS(this->dtype(), DataType);
        IS(this->weight(), Tensor);
        IS(this->bias(), Tensor);
        IS(this->weight_, nn::Parameter);
        IS(this->bias_, nn::Parameter);
        IS(this->compute_linear(input), Tensor);
        IS(this->in_features_, size_t);
        IS(this->out_features_, size_t);
        IS(this->has_bias_, bool);
        IS(this->dtype_, DataType);
        if constexpr (!std::is_same_v<Base, nn::BaseLinear>) {
            IS(this->extra_repr(), std::string);
        }
        if constexpr (!std::is_same_v<Base, nn::BaseLinear> && !std::is_same_v<Base, nn::Linear>) {
            IS(this->tp_rank_, Size);
            IS(this->tp_size_, Size);
        }
        if constexpr (std::is_same_v<Base, nn::RowParallelLinear>) {
            IS(this->communicator_, infinicclComm_t);
        }
    }
};
template struct OfLinear<nn::BaseLinear>;
template struct OfLinear<nn::Linear>;
template struct OfLinear<nn::ColumnParallelLinear>;
template struct OfLinear<nn::RowParallelLinear>;
IS(nn::BaseLinear(size_t{}, size_t{}), nn::BaseLinear);
IS(nn::BaseLinear(size_t{}, size_t{}, true, kF32, on), nn::BaseLinear);
IS(nn::Linear(size_t{}, size_t{}), nn::Linear);
IS(nn::Linear(size_t{}, size_t{}, true, kF32, on), nn::Linear);
IS(nn::ColumnParallelLinear(size_t{}, size_t{}), nn::ColumnParallelLinear);
IS(nn::ColumnParallelLinear(size_t{}, size_t{}, true, kF32, on, Size{}, Size{1}), nn::ColumnParallelLinear);
IS(nn::RowParallelLinear(size_t{}, size_t{}), nn::RowParallelLinear);
IS(nn::RowParallelLinear(size_t{}, size_t{}, true, kF32, on, Size{}, Size{1}, infinicclComm_t{}),
   nn::RowParallelLinear);

IS(nn::Embedding(size_t{}, size_t{}), nn::Embedding);
IS(nn::Embedding(size_t{}, size_t{}, std::optional<int64_t>(), kF32, on), nn::Embedding);
extern const nn::Embedding &embedding;
IS(embedding.forward(x), Tensor);
IS(embedding.num_embeddings(), size_t);
IS(embedding.embedding_dim(), size_t);
IS(embedding.padding_idx(), std::optional<int64_t>);
IS(embedding.dtype(), DataType);
IS(embedding.extra_repr(), std::string);
IS(embedding.weight(), Tensor);
IS(nn::RMSNorm(size_t{}), nn::RMSNorm);
IS(nn::RMSNorm(size_t{}, 1e-5, kF32, on), nn::RMSNorm);
extern const nn::RMSNorm &norm;
IS(norm.forward(x), Tensor);
IS(norm.normalized_shape(), size_t);
IS(norm.eps(), double);
IS(norm.dtype(), DataType);
IS(norm.extra_repr(), std::string);
IS(norm.weight(), Tensor);
template <typename Base> struct WithWeight : Base {
    void check() { IS(this->weight_, nn::Parameter); }
};
template struct WithWeight<nn::Embedding>;
template struct WithWeight<nn::RMSNorm>;

constexpr nn::RoPE::Algo kAlgos[] = {nn::RoPE::Algo::GPT_J, nn::RoPE::Algo::GPT_NEOX};
constexpr nn::RoPE::ScalingType kScalings[] = {nn::RoPE::ScalingType::DEFAULT, nn::RoPE::ScalingType::LONGROPE};
IS(a<const nn::RoPE::ScalingConfig>.type(), nn::RoPE::ScalingType);
struct OfScaling : nn::RoPE::ScalingConfig {
    OfScaling() : ScalingConfig(nn::RoPE::ScalingType::DEFAULT) { IS(type_, nn::RoPE::ScalingType); }
};
using Factors = std::vector<float>;
IS(nn::RoPE::LongRopeConfig(Factors(), Factors(), size_t{}), nn::RoPE::LongRopeConfig);
IS(nn::RoPE::LongRopeConfig(Factors(), Factors(), size_t{}, 2.0f), nn::RoPE::LongRopeConfig);
static_assert(std::is_base_of_v<nn::RoPE::ScalingConfig, nn::RoPE::LongRopeConfig>);
struct OfLongRope : nn::RoPE::LongRopeConfig {
    void check() const {
        IS(short_factor_, Factors);
        IS(long_factor_, Factors);
        IS(original_max_position_embeddings_, size_t);
        IS(factor_, float);
        IS(original_max_position_embeddings(), size_t);
        IS(short_factor(), const Factors &);
        IS(long_factor(), const Factors &);
        IS(factor(), float);
    }
};
IS(nn::RoPE(size_t{}, size_t{}), nn::RoPE);
IS(nn::RoPE(size_t{}, size_t{}, 1e6, kAlgo, kF32, on, std::shared_ptr<nn::RoPE::ScalingConfig>()), nn::RoPE);
extern const nn::RoPE &rope;
IS(rope.forward(x, y), Tensor);
IS(rope.forward(x, y, true), Tensor);
IS(rope.forward(x, y, z), Tensor);
IS(rope.head_dim(), size_t);
IS(rope.max_seq_len(), size_t);
IS(rope.theta(), double);
IS(rope.algo(), nn::RoPE::Algo);
IS(rope.dtype(), DataType);
IS(rope.extra_repr(), std::string);
struct OfRope : nn::RoPE {
    void check() {
        IS(sin_cache_, nn::Parameter);
        IS(cos_cache_, nn::Parameter);
    }
};

// Every macro of a module, and what derived modules use.
class Layer : public nn::Module {
public:
    explicit Layer(const Device &device) {
        device_ = device;
        INFINICORE_NN_MODULE_INIT(norm, size_t{4}, 1e-6, kF32, device);
        INFINICORE_NN_MODULE_VEC_INIT(projections, 2, nn::Linear, size_t{4}, size_t{4}, false, kF32, device);
        INFINICORE_NN_PARAMETER_INIT(scale, ({4}, kF32, device));
        INFINICORE_NN_BUFFER_INIT(table, ({4}, kF32, device));
        IS(register_parameter("extra", scale_), Tensor);
        IS(register_buffer("extra", table_), Tensor);
        IS(add_module("extra", norm_), std::shared_ptr<nn::RMSNorm>);
        IS(register_module<nn::RMSNorm>("extra", size_t{4}), std::shared_ptr<nn::RMSNorm>);
        IS(register_modules<nn::RMSNorm>(2, "extra", size_t{4}), std::vector<std::shared_ptr<nn::RMSNorm>>);
        IS(submodules_, Modules);
        IS(buffers_, Parameters);
        IS(parameters_, Parameters);
    }

private:
    INFINICORE_NN_MODULE(nn::RMSNorm, norm);
    INFINICORE_NN_MODULE_VEC(nn::Linear, projections);
    INFINICORE_NN_PARAMETER(scale);
    INFINICORE_NN_BUFFER(table);
};

// The macros of an op of the graph kind.
INFINICORE_GRAPH_OP_CLASS(Copy, Tensor, Tensor);
INFINICORE_GRAPH_OP_DISPATCHERS_IMPL(Copy);
void *plan_copy(Tensor out, Tensor in) {
    return new std::pair<graph::GraphTensor, graph::GraphTensor>(out, in);
}
void run_copy(void *meta) {
    auto &plan = *static_cast<std::pair<graph::GraphTensor, graph::GraphTensor> *>(meta);
    op::rearrange_(plan.first, plan.second);
}
void cleanup_copy(void **meta) {
    delete static_cast<std::pair<graph::GraphTensor, graph::GraphTensor> *>(*meta);
    *meta = nullptr;
}
INFINICORE_GRAPH_OP_REGISTER_ALLDEVICE(Copy, plan_copy, run_copy, cleanup_copy);
Copy::Copy(Tensor out, Tensor in) {
    INFINICORE_GRAPH_OP_DISPATCH(out->device().getType(), out, in);
}
void Copy::execute(Tensor out, Tensor in) {
    INFINICORE_GRAPH_OP_RECORD_OR_RUN(Copy, out, in);
}

void modules_and_macros(const Device &device) {
    Layer layer(device);
    const auto &names = layer.state_dict();
    CHECK(names.size() == 4 && names.count("norm.weight") == 1 && names.count("projections.1.weight") == 1);
    CHECK(names.count("scale") == 1 && names.count("table") == 0);
    const Tensor ones = Tensor::ones({4}, kF32, device);
    Tensor copy = Tensor::zeros({4}, kF32, device);
    Copy::execute(copy, ones);
    context::syncStream();
    const Tensor host = copy->to(Device::cpu());
    CHECK(reinterpret_cast<const float *>(host->data())[3] == 1.0f);
    CHECK(std::size(kTypes) == 11 && std::size(kDtypes) == 19 && std::size(kAlgos) == 2 && std::size(kScalings) == 2);
}

} // namespace

int main(int count, char **arguments) {
    const Device device = device_of(count, arguments);
    context::setDevice(device);
    CHECK_RUNS("modules_and_macros", modules_and_macros(device));
    return failures() != 0;
}
