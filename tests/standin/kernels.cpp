// Gives Python the kernel that torch has for an op, as `_dispatch_get_computed_kernel_for_dispatch_key`
// of torch 2.9 and newer does.  Built for older releases alone, with -fno-access-control: what an
// operator's entry has looked up is private there.
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

namespace {

struct Kernel {
    c10::OperatorHandle op;
    c10::KernelFunction function;  // a copy: it stays the one that was there before an override

    py::object call_boxed(c10::DispatchKeySet keys, const py::args& args, const py::kwargs& kwargs) {
        auto stack = torch::jit::createStackForSchema(op.schema(), args, kwargs, std::nullopt);
        {
            py::gil_scoped_release unlocked;
            function.callBoxed(op, keys, &stack);
        }
        return torch::jit::createPyObjectForStack(std::move(stack));
    }
};

Kernel kernel_of(const std::string& name, c10::DispatchKey key) {
    const auto dot = name.find('.');
    const auto overload = dot == std::string::npos ? "" : name.substr(dot + 1);
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        name.substr(0, dot).c_str(), overload.c_str());
    return {op, op.operatorDef_->op.lookup(c10::DispatchKeySet(key))};
}

}  // namespace

PYBIND11_MODULE(standin_kernels, module) {
    py::class_<Kernel>(module, "Kernel")
        .def("call_boxed", torch::wrap_pybind_function(&Kernel::call_boxed));
    module.def("kernel_of", torch::wrap_pybind_function(&kernel_of));
}
