# Which chips the CUDA sources are compiled for, by the table of architectures in cc/api/archs.h.
#
# GROUPED_CUDA_ARCHS (in)   "found": the chips of this machine, all where there is none; "all"; or some of
#   80    sm_80 code of the portable kernels, for chips of major version 8
#   89    sm_89 code of them, beside 80 only of those that convert or multiply FP8, which it has instructions for: chips of
#         8.9 run sm_80 code of the others
#   90    sm_90 code of them, and PTX of compute_90, which the driver compiles for chips newer than Hopper
#   90a   sm_90 code of them without PTX: a Hopper chip alone
# The kernels of a family, such as those for Hopper, are built always: dispatch asks them by their shapes, on whatever
# chip.
# GROUPED_BUILT_ARCHS (out)     that list; the module keeps it, to refuse a chip that it has no code for
# GROUPED_PORTABLE_CODE (out)   options for *_cuda.cu
# GROUPED_FP8_CODE (out)        options for those of them that convert or multiply FP8
# GROUPED_FAMILIES (out)        sm90: its kernels are *_sm90.cu, options for them are GROUPED_CODE_sm90
include(CheckCompilerFlag)

# Rows `X(80, 80, 89)` and `X(sm90, 90)`; kLater: those of all later chips, too.
set(arch_table "${CMAKE_SOURCE_DIR}/cc/api/archs.h")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${arch_table}")
file(READ "${arch_table}" arch_rows)
string(REGEX MATCHALL "X\\([0-9]+, [0-9]+, [0-9a-zA-Z]+\\)" portable_rows "${arch_rows}")
string(REGEX MATCHALL "X\\(sm[0-9]+, [0-9]+\\)" family_rows "${arch_rows}")
set(portable_archs "")
set(later_archs "")
foreach(row IN LISTS portable_rows)
  string(REGEX MATCH "X\\(([0-9]+), ([0-9]+), ([0-9a-zA-Z]+)\\)" _ "${row}")
  list(APPEND portable_archs ${CMAKE_MATCH_1})
  if(CMAKE_MATCH_3 STREQUAL "kLater")
    list(APPEND later_archs ${CMAKE_MATCH_1})
  endif()
endforeach()
set(all_archs ${portable_archs})
set(GROUPED_FAMILIES "")
foreach(row IN LISTS family_rows)
  string(REGEX MATCH "X\\((sm[0-9]+), ([0-9]+)\\)" _ "${row}")
  list(APPEND GROUPED_FAMILIES ${CMAKE_MATCH_1})
  list(APPEND all_archs ${CMAKE_MATCH_2}a)
  set(GROUPED_CODE_${CMAKE_MATCH_1} -gencode=arch=compute_${CMAKE_MATCH_2}a,code=sm_${CMAKE_MATCH_2}a)
endforeach()

# By compute capability, as `nvidia-smi` prints them.
function(archs_of_this_machine result)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE capabilities ERROR_QUIET RESULT_VARIABLE failed)
  set(archs "")
  if(NOT failed)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${capabilities}")
    foreach(capability IN LISTS capabilities)
      string(REPLACE "." "" chip "${capability}")
      set(found ${chip}a)
      if(NOT found IN_LIST all_archs)
        list(GET portable_archs 0 found)
        foreach(arch IN LISTS portable_archs)  # the newest that is no newer than the chip
          if(NOT arch GREATER chip)
            set(found ${arch})
          endif()
        endforeach()
      endif()
      list(APPEND archs ${found})
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
    list(JOIN all_archs ", " known)
    message(FATAL_ERROR "GROUPED_CUDA_ARCHS: ${arch}, expected found, all, or a list of ${known}; "
                        "pass e.g. -DGROUPED_CUDA_ARCHS=90a for an H100")
  endif()
endforeach()
set(GROUPED_BUILT_ARCHS "${asked_archs}")

set(GROUPED_FP8_CODE "")
foreach(arch IN LISTS asked_archs)
  string(REPLACE "a" "" chip "${arch}")
  if(arch IN_LIST later_archs)
    list(APPEND GROUPED_FP8_CODE -gencode=arch=compute_${arch},code=[sm_${arch},compute_${arch}])
  elseif(arch STREQUAL chip OR NOT chip IN_LIST asked_archs)
    list(APPEND GROUPED_FP8_CODE -gencode=arch=compute_${chip},code=sm_${chip})
  endif()
endforeach()
set(GROUPED_PORTABLE_CODE ${GROUPED_FP8_CODE})
if("80" IN_LIST asked_archs)
  list(REMOVE_ITEM GROUPED_PORTABLE_CODE -gencode=arch=compute_89,code=sm_89)
endif()

# A module of a quarter of the size. Only drivers since that of CUDA 12.4 (550.54.14) load it.
check_compiler_flag(CUDA --compress-mode=size GROUPED_NVCC_COMPRESSES)
if(GROUPED_NVCC_COMPRESSES)
  list(TRANSFORM GROUPED_FAMILIES PREPEND GROUPED_CODE_ OUTPUT_VARIABLE family_code)
  foreach(code IN ITEMS GROUPED_PORTABLE_CODE GROUPED_FP8_CODE ${family_code})
    list(APPEND ${code} --compress-mode=size)
  endforeach()
endif()
