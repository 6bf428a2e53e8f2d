// Streams an answer from a NeoFlex server. Usage: see ../README.md.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "neoflex/v1/inference.grpc.pb.h"

namespace {

using neoflex::v1::InferenceService;
using Options = std::map<std::string, std::string>;

constexpr int kMaxMessageBytes = 64 << 20;  // gRPC's default is 4 MiB.

std::unique_ptr<InferenceService::Stub> connect(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
    arguments.SetMaxSendMessageSize(kMaxMessageBytes);
    // So that no proxy takes a stream that waits for its turn for dead.
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
    arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // However long it waits.
    return InferenceService::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
}

neoflex::v1::GenerateStreamRequest make_request(const std::string& prompt, const Options& options) {
    neoflex::v1::GenerateStreamRequest message;
    auto& request = *message.mutable_request();
    if (options.count("raw")) {
        request.set_text(prompt);
    } else {
        auto& turn = *request.mutable_chat()->add_messages();
        turn.set_role("user");
        turn.set_content(prompt);
    }
    if (options.count("temperature"))
        request.mutable_sampling()->set_temperature(std::stof(options.at("temperature")));
    if (options.count("max-tokens"))
        request.mutable_stopping()->set_max_tokens(std::stoi(options.at("max-tokens")));
    return message;
}

grpc::Status stream(InferenceService::Stub& stub, const std::string& prompt, const Options& options) {
    grpc::ClientContext context;
    if (options.count("timeout")) {
        const std::chrono::duration<double> seconds(std::stod(options.at("timeout")));
        context.set_deadline(std::chrono::system_clock::now() +
                             std::chrono::duration_cast<std::chrono::system_clock::duration>(seconds));
    }
    const auto request = make_request(prompt, options);
    const auto reader = stub.GenerateStream(&context, request);
    neoflex::v1::GenerateStreamResponse message;
    int num_tokens = 0;
    while (reader->Read(&message)) {
        if (message.has_started()) {
            const auto& started = message.started();
            std::cerr << "request " << started.request_id() << ": " << started.prompt_tokens() << " tokens in\n";
        } else if (message.has_delta()) {
            std::cout << message.delta().text() << std::flush;
            num_tokens += message.delta().token_ids_size();
            if (options.count("cancel-after") && num_tokens >= std::stoi(options.at("cancel-after")))
                context.TryCancel();
        } else {
            const auto& finished = message.finished();
            std::cerr << '\n' << finished.usage().completion_tokens() << " tokens out: "
                      << neoflex::v1::FinishReason_Name(finished.finish().reason()) << '\n';
        }
    }
    const grpc::Status status = reader->Finish();
    if (status.error_code() != grpc::StatusCode::CANCELLED) return status;
    std::cerr << "\ncancelled after " << num_tokens << " tokens\n";
    return grpc::Status::OK;
}

grpc::Status round_trip(InferenceService::Stub& stub, const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    neoflex::v1::TokenizeRequest tokenize;
    tokenize.set_text(text.str());
    neoflex::v1::TokenizeResponse tokens;
    grpc::ClientContext there;
    grpc::Status status = stub.Tokenize(&there, tokenize, &tokens);
    if (!status.ok()) return status;
    neoflex::v1::DetokenizeRequest detokenize;
    *detokenize.mutable_token_ids() = tokens.token_ids();
    neoflex::v1::DetokenizeResponse back;
    grpc::ClientContext and_back;
    status = stub.Detokenize(&and_back, detokenize, &back);
    if (!status.ok()) return status;
    std::cout << text.str().size() << " bytes, " << tokens.token_ids_size() << " tokens, "
              << (back.text() == text.str() ? "the same text" : "another text") << '\n';
    return status;
}

const char* name_of(grpc::StatusCode code) {
    switch (code) {
        case grpc::StatusCode::INVALID_ARGUMENT: return "INVALID_ARGUMENT";
        case grpc::StatusCode::DEADLINE_EXCEEDED: return "DEADLINE_EXCEEDED";
        case grpc::StatusCode::RESOURCE_EXHAUSTED: return "RESOURCE_EXHAUSTED";
        case grpc::StatusCode::UNAVAILABLE: return "UNAVAILABLE";
        default: return "another status";
    }
}

void describe(const grpc::Status& failure) {
    std::cerr << "error: " << name_of(failure.error_code()) << ": " << failure.error_message() << '\n';
    google::rpc::Status status;
    status.ParseFromString(failure.error_details());
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad;
    google::rpc::RetryInfo retry;
    for (const auto& detail : status.details()) {
        if (detail.UnpackTo(&info)) std::cerr << "reason: " << info.reason() << '\n';
        if (detail.UnpackTo(&bad))
            for (const auto& violation : bad.field_violations())
                std::cerr << "field " << violation.field() << ": " << violation.description() << '\n';
        if (detail.UnpackTo(&retry)) {
            const auto& delay = retry.retry_delay();
            std::cerr << "try again in " << delay.seconds() + delay.nanos() / 1e9 << " s\n";
        }
    }
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    std::vector<std::string> positional;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        if (argument.rfind("--", 0) != 0)
            positional.push_back(argument);
        else if (argument == "--raw" || i + 1 == argc)
            options[argument.substr(2)] = "";
        else
            options[argument.substr(2)] = argv[++i];
    }
    if (positional.empty()) {
        std::cerr << "usage: see README.md\n";
        return 2;
    }
    const auto stub = connect(positional[0]);
    const auto status = options.count("round-trip")
                            ? round_trip(*stub, options["round-trip"])
                            : stream(*stub, positional.size() > 1 ? positional[1] : "", options);
    if (status.ok()) return 0;
    describe(status);
    return 1;
}
