// The random generators of the devices: a seed, and the number of the next draw.

#pragma once

#include <ATen/core/Generator.h>

namespace example {

// Return the generator that operators of a device use by default.
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// Return the CPU generator for the next operator. Draws are numbered when operators are called and
// not when they run, so the results do not depend on the speed of the streams.
at::Generator next_draw(const at::Generator& generator);

}  // namespace example
