// Shared by the sources of the runtime; kernels do not see it.
#pragma once
#include "level.h"

namespace kvd {

// Whether this processor has what a level needs, and the kernel allows it.
bool level_runs_here(const char *name);

// The level's kernels in this library, or NULL.
const LevelTable *find_level(const char *name);

}  // namespace kvd
