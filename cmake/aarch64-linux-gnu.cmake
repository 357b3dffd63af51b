# Builds for aarch64 Linux (Grace and others) on another machine: cmake --toolchain cmake/aarch64-linux-gnu.cmake ...
# needs g++-aarch64-linux-gnu; the headers of Python are those of the interpreter that runs here, of the same minor
# version. `make test-aarch64` runs the module under an emulator.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
