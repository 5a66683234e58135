// Generates a text and prints it as it comes; a stream that breaks is resumed where it broke.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	specdec "specdec.example/specdecv1"
)

const maxHandedBack = 16384 // tokens that a ResumeRequest may hold

// transcript is what has come of a session.
type transcript struct {
	last    *specdec.GenerateResponse
	tokens  []uint32
	origins []specdec.TokenOrigin
}

// add prints what is new in a chunk and keeps it.
func (t *transcript) add(chunk *specdec.GenerateResponse) error {
	known := len(t.tokens) - int(chunk.Offset)
	if known < 0 {
		return fmt.Errorf("tokens are missing: the chunk begins at %d, and %d have come", chunk.Offset, len(t.tokens))
	}
	for i, token := range chunk.Tokens {
		if i < known && token != t.tokens[int(chunk.Offset)+i] {
			return fmt.Errorf("token %d is not the one that came before", int(chunk.Offset)+i)
		}
	}
	if known > 0 && known == len(chunk.Tokens) && !bytes.Equal(chunk.Digest, t.last.Digest) {
		return errors.New("the digest is not the one that came before")
	}
	if known > len(chunk.Tokens) || (known == len(chunk.Tokens) && chunk.Finish == nil) {
		return nil // nothing is new
	}
	begin := 0 // in code points
	if known > 0 {
		begin = int(chunk.TextEnds[known-1])
	}
	fmt.Print(string([]rune(chunk.Text)[begin:]))
	t.last, t.tokens, t.origins = chunk, append(t.tokens, chunk.Tokens[known:]...), append(t.origins, chunk.Origins[known:]...)
	return nil
}

// resumption asks for what comes after the transcript.
func (t *transcript) resumption() *specdec.ResumeRequest {
	from := len(t.tokens) - maxHandedBack
	if from < 0 {
		from = 0
	}
	return &specdec.ResumeRequest{
		SessionId: t.last.SessionId, Offset: uint32(len(t.tokens)), Digest: t.last.Digest, Proof: t.last.Proof,
		Tokens: t.tokens[from:], Origins: t.origins[from:],
	}
}

// attempt reads one stream to its end: nil only where the session has finished.
func attempt(ctx context.Context, client specdec.GenerationServiceClient, request *specdec.GenerateRequest, t *transcript) error {
	var receive func() (*specdec.GenerateResponse, error)
	if t.last == nil {
		stream, err := client.Generate(ctx, request)
		if err != nil {
			return err
		}
		receive = stream.Recv
	} else {
		stream, err := client.Resume(ctx, t.resumption())
		if err != nil {
			return err
		}
		receive = func() (*specdec.GenerateResponse, error) {
			response, err := stream.Recv()
			return response.GetChunk(), err
		}
	}
	for {
		chunk, err := receive()
		if err == io.EOF {
			return status.Error(codes.Unavailable, "the stream ended before the text did")
		} else if err != nil {
			return err
		} else if err := t.add(chunk); err != nil {
			return status.Error(codes.DataLoss, err.Error())
		} else if chunk.Finish != nil {
			return nil
		}
	}
}

// pauseAfter returns whether a failure is worth another attempt, and the pause that the server asks for.
func pauseAfter(failure *status.Status) (bool, time.Duration) {
	var fromSpecdec, hasPause bool
	var pause time.Duration
	for _, detail := range failure.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fromSpecdec = fromSpecdec || detail.Domain == "specdec"
		case *errdetails.RetryInfo:
			delay := detail.GetRetryDelay()
			hasPause, pause = true, time.Duration(delay.GetSeconds())*time.Second+time.Duration(delay.GetNanos())
		}
	}
	switch failure.Code() {
	case codes.Unavailable, codes.Aborted:
		return true, pause
	case codes.ResourceExhausted:
		return hasPause, pause
	case codes.Canceled, codes.Unknown, codes.Internal: // proxies send them for broken connections
		return !fromSpecdec, 0
	}
	return false, 0
}

func run(address, prompt, requestID string, seed uint64) error {
	// Plain text is for loopback. From grpc 1.63 on:
	// grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()

	numNewTokens, numDraftTokens, drafter := uint32(200), uint32(4), "model"
	request := &specdec.GenerateRequest{
		RequestId: requestID, // the same one in every attempt
		Prompt:    &specdec.GenerateRequest_Text{Text: prompt},
		Sampling:  &specdec.SamplingParams{Seed: &seed, MaxNewTokens: &numNewTokens, IgnoreEos: true},
		// both may be left out: the service chooses; with fixed ones a seed repeats its text
		Speculation: &specdec.SpeculationParams{NumDraftTokens: &numDraftTokens, Drafter: &drafter},
	}
	client, t := specdec.NewGenerationServiceClient(connection), &transcript{}
	backoff := 100 * time.Millisecond
	for {
		numBefore := len(t.tokens)
		err := attempt(ctx, client, request, t)
		if err == nil {
			fmt.Fprintf(os.Stderr, "%s, %d tokens\n", t.last.Finish.Reason, len(t.tokens))
			return nil
		}
		again, pause := pauseAfter(status.Convert(err))
		if !again || ctx.Err() != nil {
			return err
		}
		if len(t.tokens) > numBefore {
			backoff = 100 * time.Millisecond
		}
		fmt.Fprintf(os.Stderr, "broken after %d tokens: %v\n", len(t.tokens), err)
		time.Sleep(pause + backoff)
		if backoff *= 2; backoff > 5*time.Second {
			backoff = 5 * time.Second
		}
	}
}

func main() {
	if len(os.Args) != 5 {
		fmt.Fprintln(os.Stderr, "usage: resuming ADDRESS PROMPT REQUEST_ID SEED")
		os.Exit(2)
	}
	seed, err := strconv.ParseUint(os.Args[4], 10, 64)
	if err == nil {
		err = run(os.Args[1], os.Args[2], os.Args[3], seed)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
