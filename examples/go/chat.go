// Streams an answer from a NeoFlex server. Usage: see ../README.md.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	neoflex "neoflex/v1"
)

const maxMessageBytes = 64 << 20 // gRPC's default is 4 MiB.

type options struct {
	raw         bool
	maxTokens   int
	temperature float64
	timeout     time.Duration
	cancelAfter int
	roundTrip   string
}

func connect(address string) (*grpc.ClientConn, error) {
	return grpc.Dial(address,
		grpc.WithInsecure(),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessageBytes), grpc.MaxCallSendMsgSize(maxMessageBytes)),
		// So that no proxy takes a stream that waits for its turn for dead.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 10 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true}))
}

func makeRequest(prompt string, given options) *neoflex.GenerateRequest {
	request := &neoflex.GenerateRequest{Sampling: &neoflex.SamplingOptions{}, Stopping: &neoflex.StoppingOptions{}}
	if given.raw {
		request.Prompt = &neoflex.GenerateRequest_Text{Text: prompt}
	} else {
		turn := &neoflex.ChatMessage{Role: "user", Content: prompt}
		request.Prompt = &neoflex.GenerateRequest_Chat{Chat: &neoflex.Chat{Messages: []*neoflex.ChatMessage{turn}}}
	}
	if given.temperature >= 0 {
		temperature := float32(given.temperature)
		request.Sampling.Temperature = &temperature
	}
	if given.maxTokens > 0 {
		maxTokens := int32(given.maxTokens)
		request.Stopping.MaxTokens = &maxTokens
	}
	return request
}

func stream(client neoflex.InferenceServiceClient, prompt string, given options) error {
	ctx, cancel := context.WithCancel(context.Background())
	if given.timeout > 0 {
		ctx, cancel = context.WithTimeout(context.Background(), given.timeout)
	}
	defer cancel()
	request := makeRequest(prompt, given)
	answer, err := client.GenerateStream(ctx, &neoflex.GenerateStreamRequest{Request: request})
	if err != nil {
		return err
	}
	numTokens := 0
	for {
		message, err := answer.Recv()
		if err == io.EOF {
			return nil
		}
		if status.Code(err) == codes.Canceled {
			fmt.Fprintf(os.Stderr, "\ncancelled after %d tokens\n", numTokens)
			return nil
		}
		if err != nil {
			return err
		}
		switch event := message.Event.(type) {
		case *neoflex.GenerateStreamResponse_Started:
			started := event.Started
			fmt.Fprintf(os.Stderr, "request %s: %d tokens in\n", started.RequestId, started.PromptTokens)
		case *neoflex.GenerateStreamResponse_Delta:
			fmt.Print(event.Delta.Text)
			numTokens += len(event.Delta.TokenIds)
			if given.cancelAfter > 0 && numTokens >= given.cancelAfter {
				cancel()
			}
		case *neoflex.GenerateStreamResponse_Finished:
			finished := event.Finished
			fmt.Fprintf(os.Stderr, "\n%d tokens out: %s\n", finished.Usage.CompletionTokens, finished.Finish.Reason)
		}
	}
}

func roundTrip(client neoflex.InferenceServiceClient, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	ctx := context.Background()
	input := &neoflex.TokenizeRequest_Text{Text: string(text)}
	tokens, err := client.Tokenize(ctx, &neoflex.TokenizeRequest{Input: input})
	if err != nil {
		return err
	}
	back, err := client.Detokenize(ctx, &neoflex.DetokenizeRequest{TokenIds: tokens.TokenIds})
	if err != nil {
		return err
	}
	outcome := "the same text"
	if back.Text != string(text) {
		outcome = "another text"
	}
	fmt.Printf("%d bytes, %d tokens, %s\n", len(text), len(tokens.TokenIds), outcome)
	return nil
}

func describe(err error) {
	failure := status.Convert(err)
	fmt.Fprintf(os.Stderr, "error: %s: %s\n", failure.Code(), failure.Message())
	for _, detail := range failure.Details() {
		switch value := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Fprintf(os.Stderr, "reason: %s\n", value.Reason)
		case *errdetails.BadRequest:
			for _, violation := range value.FieldViolations {
				fmt.Fprintf(os.Stderr, "field %s: %s\n", violation.Field, violation.Description)
			}
		case *errdetails.RetryInfo:
			delay := time.Duration(value.RetryDelay.Seconds)*time.Second + time.Duration(value.RetryDelay.Nanos)
			fmt.Fprintf(os.Stderr, "try again in %g s\n", delay.Seconds())
		}
	}
}

func main() {
	var given options
	var seconds float64
	flag.BoolVar(&given.raw, "raw", false, "the prompt as it is, without the chat template")
	flag.IntVar(&given.maxTokens, "max-tokens", 0, "most tokens to generate")
	flag.Float64Var(&given.temperature, "temperature", -1, "0 is greedy")
	flag.Float64Var(&seconds, "timeout", 0, "deadline in seconds")
	flag.IntVar(&given.cancelAfter, "cancel-after", 0, "cancel after so many tokens")
	flag.StringVar(&given.roundTrip, "round-trip", "", "file whose text becomes tokens and text again")
	flag.Parse()
	given.timeout = time.Duration(seconds * float64(time.Second))
	connection, err := connect(flag.Arg(0))
	if err == nil {
		defer connection.Close()
		client := neoflex.NewInferenceServiceClient(connection)
		if given.roundTrip != "" {
			err = roundTrip(client, given.roundTrip)
		} else {
			err = stream(client, flag.Arg(1), given)
		}
	}
	if err != nil {
		describe(err)
		os.Exit(1)
	}
}
