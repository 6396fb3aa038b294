// Asks NVRTC for a kernel as MLX does (mlx/backend/cuda/jit_module.cpp): the same calls, in its order.
#include <nvrtc.h>

#include <cstring>
#include <string>
#include <vector>

namespace {

// As MLX's: what a text may include, in short.
const char* header_names[] = {"mlx/backend/cuda/device/config.h",
                              "mlx/backend/cuda/device/utils.cuh"};
const char* headers[] = {
    "#pragma once\n#define MAX_NDIM 10\n",
    "#pragma once\n#ifdef WITHOUT_MLX\n#error the headers of MLX\n#endif\n"
    "#include \"mlx/backend/cuda/device/config.h\"\n"
    "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cuda/std/array>\n"
    "namespace mlx::core::cu {\n"
    "using Shape = cuda::std::array<int, MAX_NDIM>;\n"
    "using Strides = cuda::std::array<long, MAX_NDIM>;\n"
    "__device__ inline int only_in_utils() { return 7; }\n}\n"};

}  // namespace

// 0, or the number of the call that failed. said: the log, or the mangled name.
extern "C" int compile(const char* text, const char* name, int count, const char** options,
                       bool machine_code, std::size_t room, char* said, char* code,
                       std::size_t* size) {
  nvrtcProgram program;
  if (nvrtcCreateProgram(&program, text, "kernel.cu", 2, headers, header_names)) return 1;
  int failed = 0;
  if (nvrtcAddNameExpression(program, name)) failed = 2;
  if (!failed && nvrtcCompileProgram(program, count, options)) {
    std::size_t length;
    std::vector<char> log;
    if (nvrtcGetProgramLogSize(program, &length)) return 4;
    log.resize(length + 1);
    if (nvrtcGetProgramLog(program, log.data())) return 5;
    std::strncpy(said, log.data(), room - 1);
    failed = 3;
  }
  if (!failed) {
    const char* mangled;
    if (nvrtcGetLoweredName(program, name, &mangled)) return 6;
    const std::string copied = mangled;
    if (machine_code ? nvrtcGetCUBINSize(program, size) : nvrtcGetPTXSize(program, size)) return 7;
    if (*size > room) return 8;
    if (machine_code ? nvrtcGetCUBIN(program, code) : nvrtcGetPTX(program, code)) return 9;
    std::strncpy(said, copied.c_str(), room - 1);
  }
  if (nvrtcDestroyProgram(&program) || program) return 10;
  return failed;
}
