// Operators of the device.

#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace example {

// Calls of operators that the device lacks and that the CPU computed, by operator.
std::map<std::string, int64_t> fallback_calls();
void clear_fallback_calls();
// If false, an operator that the device lacks raises NotImplementedError.
void allow_fallback(bool allowed);
bool fallback_allowed();

}  // namespace example
