# Which chips the CUDA sources are compiled for.
#
# GROUPED_CUDA_ARCHS (in)   "found": the chips of this machine, all where there is none; "all"; or some of
#   80    sm_80 code of the portable kernels, for chips of major version 8
#   89    sm_89 code of them, beside 80 only of those that convert FP8 in bulk, which it has instructions for: chips of
#         8.9 run sm_80 code of the others
#   90    sm_90 code of them, and PTX of compute_90, which the driver compiles for chips newer than Hopper
#   90a   sm_90 code of them without PTX: a Hopper chip alone
# The Hopper kernels are built always, for sm_90a: dispatch asks them by their shapes, on whatever chip.
# GROUPED_BUILT_ARCHS (out)     that list; the module keeps it, to refuse a chip that it has no code for
# GROUPED_PORTABLE_CODE (out)   options for *_cuda.cu
# GROUPED_FP8_CODE (out)        options for those of them that convert FP8
# GROUPED_HOPPER_CODE (out)     options for *_sm90.cu
include(CheckCompilerFlag)

set(all_archs 80 89 90 90a)

# By compute capability, as `nvidia-smi` prints them.
function(archs_of_this_machine result)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE capabilities ERROR_QUIET RESULT_VARIABLE failed)
  set(archs "")
  if(NOT failed)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${capabilities}")
    foreach(capability IN LISTS capabilities)
      if(capability VERSION_EQUAL 9.0)
        list(APPEND archs 90a)
      elseif(capability VERSION_GREATER 9.0)
        list(APPEND archs 90)
      elseif(capability VERSION_EQUAL 8.9)
        list(APPEND archs 89)
      else()
        list(APPEND archs 80)
      endif()
    endforeach()
    list(REMOVE_DUPLICATES archs)
    list(SORT archs)
  endif()
  set(${result} "${archs}" PARENT_SCOPE)
endfunction()

string(REPLACE "," ";" asked_archs "${GROUPED_CUDA_ARCHS}")
if(asked_archs STREQUAL "found")
  archs_of_this_machine(asked_archs)
endif()
if(asked_archs STREQUAL "all" OR asked_archs STREQUAL "")
  set(asked_archs ${all_archs})
endif()
foreach(arch IN LISTS asked_archs)
  if(NOT arch IN_LIST all_archs)
    message(FATAL_ERROR "GROUPED_CUDA_ARCHS: ${arch}, expected found, all, or a list of 80, 89, 90 and 90a; "
                        "pass e.g. -DGROUPED_CUDA_ARCHS=90a for an H100")
  endif()
endforeach()
set(GROUPED_BUILT_ARCHS "${asked_archs}")

set(GROUPED_FP8_CODE "")
foreach(arch IN LISTS asked_archs)
  if(arch STREQUAL "90")
    list(APPEND GROUPED_FP8_CODE -gencode=arch=compute_90,code=[sm_90,compute_90])
  elseif(NOT arch STREQUAL "90a")
    list(APPEND GROUPED_FP8_CODE -gencode=arch=compute_${arch},code=sm_${arch})
  elseif(NOT "90" IN_LIST asked_archs)
    list(APPEND GROUPED_FP8_CODE -gencode=arch=compute_90,code=sm_90)
  endif()
endforeach()
set(GROUPED_PORTABLE_CODE ${GROUPED_FP8_CODE})
if("80" IN_LIST asked_archs)
  list(REMOVE_ITEM GROUPED_PORTABLE_CODE -gencode=arch=compute_89,code=sm_89)
endif()
set(GROUPED_HOPPER_CODE -gencode=arch=compute_90a,code=sm_90a)

# A module of a quarter of the size. Only drivers since that of CUDA 12.4 (550.54.14) load it.
check_compiler_flag(CUDA --compress-mode=size GROUPED_NVCC_COMPRESSES)
if(GROUPED_NVCC_COMPRESSES)
  foreach(code IN ITEMS GROUPED_PORTABLE_CODE GROUPED_FP8_CODE GROUPED_HOPPER_CODE)
    list(APPEND ${code} --compress-mode=size)
  endforeach()
endif()
