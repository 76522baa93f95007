// What the C++ tests check with: CHECK and THROWS print the place of what failed; failures() is a program's result.
#pragma once

#include <atomic>
#include <cstdio>
#include <exception>
#include <string>

inline std::atomic<int> &failures() {
    static std::atomic<int> count = 0;
    return count;
}

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                \
            ++failures();                                                                                              \
        }                                                                                                              \
    } while (false)

// The statement throws nothing.
#define CHECK_RUNS(name, statement)                                                                                    \
    try {                                                                                                              \
        statement;                                                                                                     \
    } catch (const std::exception &error) {                                                                            \
        std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, name, error.what());                                        \
        ++failures();                                                                                                  \
    }

// The expression throws a std::exception with exactly this sentence.
#define THROWS(expression, sentence)                                                                                   \
    do {                                                                                                               \
        std::string said = "nothing";                                                                                  \
        try {                                                                                                          \
            expression;                                                                                                \
        } catch (const std::exception &error) {                                                                        \
            said = error.what();                                                                                       \
        }                                                                                                              \
        if (said != (sentence)) {                                                                                      \
            std::printf("%s:%d: %s said: %s\n", __FILE__, __LINE__, #expression, said.c_str());                        \
            ++failures();                                                                                              \
        }                                                                                                              \
    } while (false)
