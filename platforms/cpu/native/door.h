// What the Python module calls, in C.
#pragma once

#include "levels.h"
#include "linear/packed.h"
#include "pool.h"
#include "torch_runtime.h"
