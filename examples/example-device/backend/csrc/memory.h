// Memory of the devices, and page-locked host memory.
//
// Each device has a range of addresses that no process may read or write: a host that dereferences
// a device pointer gets SIGSEGV. The bytes are in a second range of the same size, which only the
// threads of the streams use; device_to_host() translates.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

namespace example {

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();

// Return the address of the bytes behind a device pointer. Null stays null.
void* device_to_host(const void* pointer);
// Return the index of the device that a pointer belongs to, or -1.
c10::DeviceIndex device_of(const void* pointer) noexcept;

bool is_pinned(const void* pointer) noexcept;
// Keep pinned memory until a stream has done the tasks that it has now.
void use_pinned(const void* pointer, c10::Stream stream);

// Return a CPU tensor over the bytes of a device tensor, for use by a task. The tensor does not
// own the memory: memory that is freed now is reused by later tasks of the same stream only.
at::Tensor host_view(const at::Tensor& tensor);

}  // namespace example
