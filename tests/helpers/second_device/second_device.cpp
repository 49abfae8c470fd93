// A stand-in for an accelerator: torch's backend for other devices (PrivateUse1) over host memory.
//
// A tensor here says that it is on another device, and an operator that gets tensors of both devices
// raises, as on a GPU. All arithmetic is done by the CPU's operators on copies. There are no streams
// and no kernels of its own; random numbers come from the CPU's generator. After set_float64(false)
// it has no float64, as Apple's GPU: it says so, and refuses to make such a tensor.

#include <torch/extension.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>

#if __has_include(<c10/core/DeviceCapability.h>)  // from torch 2.10 on
#include <c10/core/DeviceCapability.h>
#define DECLARES_CAPABILITY
#endif

namespace {

constexpr auto kOther = c10::DeviceType::PrivateUse1;

bool has_float64 = true;

void check_dtype(at::ScalarType type) {
  TORCH_CHECK_TYPE(has_float64 || (type != at::kDouble && type != at::kComplexDouble),
                   "the second device has no float64, use float32 instead");
}

// Memory

void release(void* pointer) { c10::free_cpu(pointer); }

struct OtherAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {pointer, pointer, &release, c10::Device(kOther, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, std::size_t bytes) const override {
    std::memcpy(target, source, bytes);
  }
};

OtherAllocator allocator;
REGISTER_ALLOCATOR(kOther, &allocator);

// One device and one stream, on which everything is done at once

struct OtherGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kOther;
  OtherGuard() = default;
  explicit OtherGuard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kOther; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return {kOther, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex,
              const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
#ifdef DECLARES_CAPABILITY
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    c10::DeviceCapability capability;
    capability.capability_data.supported_scalar_types.has_Double = has_float64;
    capability.capability_data.supported_scalar_types.has_ComplexDouble = has_float64;
    return capability;
  }
#endif
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, OtherGuard);

struct OtherHooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

// Making, viewing and copying tensors

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  check_dtype(type);
  return at::detail::empty_generic(sizes, &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  check_dtype(type);
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

// The same memory, seen as a CPU tensor.
at::Tensor host_view(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto storage = tensor.storage();
  if (!storage.data()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  auto* start = static_cast<char*>(storage.mutable_data());
  return at::from_blob(start + tensor.storage_offset() * tensor.itemsize(), tensor.sizes(),
                       tensor.strides(), [storage](void*) {}, options);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  host_view(target).copy_(host_view(source));
  return target;
}

const at::Tensor& resize_to(const at::Tensor& tensor, at::IntArrayRef sizes,
                            std::optional<at::MemoryFormat>) {
  auto storage = tensor.storage();
  auto count = c10::multiply_integers(sizes) + tensor.storage_offset();
  size_t bytes = count * tensor.itemsize();
  if (storage.nbytes() < bytes) {
    auto memory = allocator.allocate(bytes);
    if (storage.nbytes()) std::memcpy(memory.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(memory));
    storage.set_nbytes(bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) resize_to(target, source.sizes(), {});  // keeps strides
  return copy_from(source, target, false);
}

at::Tensor& set_offset(at::Tensor& tensor, at::Storage storage, int64_t offset,
                       at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  impl->set_sizes_and_strides(sizes, strides);
  return tensor;
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  int64_t count = storage.nbytes() / tensor.itemsize();
  return set_offset(tensor, storage, 0, {count}, {1});
}

at::Tensor as_strided(const at::Tensor& tensor, c10::SymIntArrayRef sizes,
                      c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> start;
  if (offset) start = offset->expect_int();
  return at::cpu::as_strided(tensor, C10_AS_INTARRAYREF_SLOW(sizes),
                             C10_AS_INTARRAYREF_SLOW(strides), start);
}

at::Tensor reshape_alias(const at::Tensor& tensor, c10::SymIntArrayRef sizes,
                         c10::SymIntArrayRef strides) {
  return as_strided(tensor, sizes, strides, c10::SymInt(tensor.storage_offset()));
}

at::Tensor view(const at::Tensor& tensor, c10::SymIntArrayRef sizes) {
  auto inferred = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(sizes), tensor.numel());
  auto strides = at::detail::computeStride(tensor.sizes(), tensor.strides(), inferred);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with the tensor's strides");
  return at::cpu::as_strided(tensor, inferred, *strides, tensor.storage_offset());
}

at::Tensor unfold(const at::Tensor& tensor, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(tensor, dim, size, step);
}

at::Tensor to_device(const at::Tensor& host) {
  return host.defined() ? host.to(c10::Device(kOther, 0)) : host;
}

// Convolutions, which torch gives to a backend as a whole.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, at::IntArrayRef stride,
                       at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  std::optional<at::Tensor> added;
  if (bias && bias->defined()) added = host_view(*bias);
  return to_device(at::convolution(host_view(input), host_view(weight), added, stride, padding,
                                   dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> needed) {
  auto bias_size = transposed ? weight.size(1) * groups : weight.size(0);
  auto [a, b, c] = at::convolution_backward(
      host_view(gradient), host_view(input), host_view(weight), at::IntArrayRef({bias_size}),
      stride, padding, dilation, transposed, output_padding, groups, needed);
  return {to_device(a), to_device(b), to_device(c)};
}

at::Scalar item(const at::Tensor& tensor) { return host_view(tensor).item(); }

// Every other operator: on the CPU, but only if its tensors are all on this device. As on a GPU,
// scalars may be on the host, and so may the indices of x[i].

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  std::string name = op.schema().name(), on_cpu;
  auto first = stack->size() - arguments.size();
  bool here = false;
  for (size_t k = 0; k < arguments.size(); k++) {
    auto look = [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (tensor.is_privateuseone()) here = true;
      else if (tensor.device().is_cpu() && tensor.dim() > 0) on_cpu = arguments[k].name();
    };
    const auto& value = (*stack)[first + k];
    if (value.isTensor()) look(value.toTensor());
    if (value.isOptionalTensorList())
      for (const auto& tensor : value.toOptionalTensorVector())
        here = here || (tensor && tensor->defined() && tensor->is_privateuseone());
    if (value.isTensorList()) for (const auto& tensor : value.toTensorVector()) look(tensor);
  }
  TORCH_CHECK(!here || on_cpu.empty(),
              "Expected all tensors to be on the same device, but the argument ", on_cpu, " of ",
              name, " is on the CPU and another one on the second device");
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("resize_", TORCH_FN(resize_to));
  library.impl("set_.source_Storage", TORCH_FN(set_storage));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_offset));
  library.impl("as_strided", TORCH_FN(as_strided));
  library.impl("_reshape_alias", TORCH_FN(reshape_alias));
  library.impl("view", TORCH_FN(view));
  library.impl("unfold", TORCH_FN(unfold));
  library.impl("_local_scalar_dense", TORCH_FN(item));
  library.impl("convolution_overrideable", TORCH_FN(convolution));
  library.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
}

// Under autocast matrix products take half precision, all else what it is given.

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {  // m is the macros' name
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("register_hooks", [] { at::RegisterPrivateUse1HooksInterface(new OtherHooks()); });
  module.def("set_float64", [](bool value) { has_float64 = value; });
}
