// Registers of sums in inline assembly: lists "%0, %1, ..." of the first so many operands, and the operands themselves,
// elements i and on of an array `d`, which are read and written (D) or only written (W).
#pragma once

#define GROUPED_R4 "%0, %1, %2, %3"
#define GROUPED_R8 GROUPED_R4 ", %4, %5, %6, %7"
#define GROUPED_R12 GROUPED_R8 ", %8, %9, %10, %11"
#define GROUPED_R16 GROUPED_R12 ", %12, %13, %14, %15"
#define GROUPED_R20 GROUPED_R16 ", %16, %17, %18, %19"
#define GROUPED_R24 GROUPED_R20 ", %20, %21, %22, %23"
#define GROUPED_R28 GROUPED_R24 ", %24, %25, %26, %27"
#define GROUPED_R32 GROUPED_R28 ", %28, %29, %30, %31"
#define GROUPED_R36 GROUPED_R32 ", %32, %33, %34, %35"
#define GROUPED_R40 GROUPED_R36 ", %36, %37, %38, %39"
#define GROUPED_R44 GROUPED_R40 ", %40, %41, %42, %43"
#define GROUPED_R48 GROUPED_R44 ", %44, %45, %46, %47"
#define GROUPED_R52 GROUPED_R48 ", %48, %49, %50, %51"
#define GROUPED_R56 GROUPED_R52 ", %52, %53, %54, %55"
#define GROUPED_R60 GROUPED_R56 ", %56, %57, %58, %59"
#define GROUPED_R64 GROUPED_R60 ", %60, %61, %62, %63"
#define GROUPED_R68 GROUPED_R64 ", %64, %65, %66, %67"
#define GROUPED_R72 GROUPED_R68 ", %68, %69, %70, %71"
#define GROUPED_R76 GROUPED_R72 ", %72, %73, %74, %75"
#define GROUPED_R80 GROUPED_R76 ", %76, %77, %78, %79"
#define GROUPED_R84 GROUPED_R80 ", %80, %81, %82, %83"
#define GROUPED_R88 GROUPED_R84 ", %84, %85, %86, %87"
#define GROUPED_R92 GROUPED_R88 ", %88, %89, %90, %91"
#define GROUPED_R96 GROUPED_R92 ", %92, %93, %94, %95"
#define GROUPED_R128                                                                               \
  GROUPED_R96                                                                                      \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define GROUPED_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GROUPED_D8(i) GROUPED_D4(i), GROUPED_D4(i + 4)
#define GROUPED_D16(i) GROUPED_D8(i), GROUPED_D8(i + 8)
#define GROUPED_W4(i) "=f"(d[i]), "=f"(d[i + 1]), "=f"(d[i + 2]), "=f"(d[i + 3])
#define GROUPED_W8(i) GROUPED_W4(i), GROUPED_W4(i + 4)
#define GROUPED_W16(i) GROUPED_W8(i), GROUPED_W8(i + 8)
