// Random numbers of device infini: a generator whose device is infini, around one of the backing device, from which the
// kernels draw. torch.manual_seed() seeds the default one, which ops without a generator use.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>

namespace infini::device {
namespace {

at::Generator make_below(c10::DeviceIndex index) {
    return backing.type == c10::kCPU ? at::detail::createCPUGenerator()
                                     : at::detail::getCUDAHooks().getNewGenerator(index);
}

class Generator final : public c10::GeneratorImpl {
public:
    Generator(c10::DeviceIndex index, at::Generator below)
        : c10::GeneratorImpl(c10::Device(kInfini, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
          below_(std::move(below)) {}

    const at::Generator &below() const { return below_; }

    void set_current_seed(uint64_t seed) override { below_.set_current_seed(seed); }
    void set_offset(uint64_t offset) override { below_.set_offset(offset); } // the CPU's raises: it has no offset
    uint64_t get_offset() const override { return below_.get_offset(); }
    uint64_t current_seed() const override { return below_.current_seed(); }
    uint64_t seed() override { return below_.unsafeGetGeneratorImpl()->seed(); }
    void set_state(const c10::TensorImpl &state) override { below_.unsafeGetGeneratorImpl()->set_state(state); }
    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return below_.unsafeGetGeneratorImpl()->get_state();
    }

private:
    c10::GeneratorImpl *clone_impl() const override { return new Generator(device_.index(), below_.clone()); }

    at::Generator below_;
};

} // namespace

const at::Generator &default_generator(c10::DeviceIndex index) {
    static const auto *generators = [] {
        auto *made = new std::vector<at::Generator>;
        for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
            const auto below =
                backing.type == c10::kCPU ? make_below(i) : at::detail::getCUDAHooks().getDefaultGenerator(i);
            made->push_back(at::make_generator<Generator>(i, below));
        }
        return made;
    }();
    return (*generators)[checked_index(c10::Device(kInfini, index))];
}

at::Generator new_generator(c10::DeviceIndex index) {
    const c10::DeviceIndex checked = checked_index(c10::Device(kInfini, index));
    return at::make_generator<Generator>(checked, make_below(checked));
}

at::Generator generator_below(const std::optional<at::Generator> &generator) {
    const at::Generator &used = generator && generator->defined() ? *generator : default_generator(current_index());
    TORCH_CHECK(used.device().type() == kInfini, "Expected a 'infini' device type for generator but found '",
                used.device().type(), "'");
    return used.get<Generator>()->below();
}

} // namespace infini::device
