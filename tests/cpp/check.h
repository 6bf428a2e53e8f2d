// Asserts that stay in every build and say what they saw; a test is a program that returns 0.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#define CHECK(condition)                                                                \
    do {                                                                                \
        if (!(condition)) {                                                             \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);        \
            std::abort();                                                               \
        }                                                                               \
    } while (false)

// The expression throws such an exception, whose text holds `part`.
#define CHECK_THROWS(expression, Exception, part)                                       \
    do {                                                                                \
        std::string said = "nothing was thrown";                                        \
        try {                                                                           \
            static_cast<void>(expression);                                              \
        } catch (const Exception& error) {                                              \
            said = error.what();                                                        \
        }                                                                               \
        if (said.find(part) == std::string::npos) {                                     \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, said.c_str());      \
            std::abort();                                                               \
        }                                                                               \
    } while (false)
