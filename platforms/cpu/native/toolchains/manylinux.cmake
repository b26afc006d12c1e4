# Builds a module for systems with an older C library than this one.
#
# GCC compiles, as in every build that is tested. Zig links: it knows which symbols each version of
# glibc had, of every architecture, so what is linked asks for nothing newer. Given are
# INTERPOSER_ARCHITECTURE, INTERPOSER_GLIBC (as 2.28) and INTERPOSER_ZIG, a command that runs Zig.
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES INTERPOSER_ARCHITECTURE INTERPOSER_GLIBC INTERPOSER_ZIG)
include(${CMAKE_CURRENT_LIST_DIR}/${INTERPOSER_ARCHITECTURE}-linux-gnu.cmake)

# Libraries of the compiler that every such system has, or that are copied in part.
set(LIBRARIES "")
foreach(name libstdc++.so libgcc_s.so.1 libgcc.a)
  execute_process(
    COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${name}
    OUTPUT_VARIABLE path
    OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(APPEND LIBRARIES " ${path}")
endforeach()
set(TARGET ${INTERPOSER_ARCHITECTURE}-linux-gnu.${INTERPOSER_GLIBC})
set(CMAKE_CXX_CREATE_SHARED_MODULE
  "${INTERPOSER_ZIG} cc -target ${TARGET} -shared -s -o <TARGET> <OBJECTS>${LIBRARIES}")
