// A Python module as engines of their own are built on _infinicore: it keeps handles of tensors, and a thread of C++
// drops the last ones while the caller holds the GIL and waits for that thread.
#include <pybind11/pybind11.h>

#include <thread>
#include <utility>
#include <vector>

#include <infinicore.hpp>

namespace {

class Engine {
public:
    void keep(const infinicore::Tensor &tensor) { kept_.push_back(tensor); }

    void drop_in_a_thread() {
        std::vector<infinicore::Tensor> taken = std::move(kept_);
        std::thread([&taken] { taken.clear(); }).join();
    }

private:
    std::vector<infinicore::Tensor> kept_;
};

} // namespace

PYBIND11_MODULE(engine, module) {
    pybind11::class_<Engine>(module, "Engine")
        .def(pybind11::init<>())
        .def("keep", &Engine::keep)
        .def("drop_in_a_thread", &Engine::drop_in_a_thread);
}
