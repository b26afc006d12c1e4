// What this library asks of the torch that is loaded: its threads, and the registration of ops.
// Nothing is linked: the functions are looked up in torch's own library, which names its OpenMP
// runtime, so that one binary serves many versions and brings no second runtime.
#pragma once

// Find torch in `library`, the path of the loaded libtorch_cpu. Returns null, or what is missing.
extern "C" const char* interposer_attach(const char* library);

// Define this library's ops and register them for CPU tensors, once. Returns null, or what failed.
extern "C" const char* interposer_register_ops();
